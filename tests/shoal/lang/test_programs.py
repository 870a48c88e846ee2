"""Programs on a real model: the kinds of SGLang's own language tests, and the examples of docs/examples."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shoal

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


@pytest.fixture(scope="module", autouse=True)
def engine(real_engine: shoal.Engine) -> Iterator[shoal.Engine]:
    """Where all programs here run."""
    shoal.set_default_backend(real_engine)
    yield real_engine
    shoal.global_config.default_backend = None


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples that do not depend on what is said say little."""
    gen = shoal.gen
    monkeypatch.setattr(shoal, "gen", lambda name, max_tokens, **given: gen(name, max_tokens=max_tokens // 4, **given))


@shoal.function
def capital(s: Any, country: str) -> None:
    for other, answer in (("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo")):
        s += f"Q: What is the capital of {other}?\nA: {answer}\n"
    s += f"Q: What is the capital of {country}?\nA:" + shoal.gen("answer", stop="\n", max_tokens=6)


def test_few_shot_and_a_batch() -> None:
    assert "Berlin" in capital.run("Germany", temperature=0)["answer"]
    states = capital.run_batch([{"country": "Norway"}, {"country": "Germany"}, {"country": "Portugal"}], temperature=0)
    assert [state["answer"].strip() for state in states] == ["Oslo", "Berlin", "Lisbon"]


def test_a_batch_says_what_single_runs_say() -> None:
    countries = ["Greece", "Norway"]
    alone = [capital.run(country, temperature=0).text() for country in countries]
    assert [state.text() for state in capital.run_batch([[c] for c in countries], temperature=0)] == alone
    assert [state.text() for state in capital.compile().run_batch([[c] for c in countries], temperature=0)] == alone


def test_a_conversation() -> None:
    @shoal.function
    def conversation(s: Any) -> None:
        s += shoal.system("You are a helpful assistant.")
        s += shoal.user("Name a color.")
        s += shoal.assistant(shoal.gen("first"))
        with s.user():
            s += "Another one."
        with s.assistant():
            s += shoal.gen("second")

    state = conversation.run(temperature=0, max_new_tokens=8)
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert "<|im_start|>user\nAnother one.<|im_end|>" in state.text()
    assert state.get_meta_info("second")["cached_tokens"] > 0


def test_a_conversation_says_what_the_chat_endpoint_says(engine: Any) -> None:
    messages = [{"role": "user", "content": "Name a color."}]
    chat = shoal.function(lambda s: s.append(shoal.user("Name a color.") + shoal.assistant(shoal.gen("a"))))
    state = chat.run(temperature=0, max_new_tokens=8)
    assert engine.chat(messages, temperature=0, max_tokens=8).text == state["a"]


@pytest.mark.parametrize(
    "method",
    [
        shoal.token_length_normalized,
        shoal.greedy_token_selection,
        shoal.unconditional_likelihood_normalized,
    ],
)
def test_select(method: Any) -> None:
    @shoal.function
    def choose(s: Any, choices: list[str]) -> None:
        s += "The capital of France is" + shoal.select("answer", choices, choices_method=method) + "."

    state = choose.run([" Paris", " a large potato", " Tokyo"], temperature=0)
    assert state["answer"] == " Paris" and state.text().endswith("is Paris.")


def test_select_gives_the_probabilities_of_the_text() -> None:
    @shoal.function
    def choose(s: Any) -> None:
        s += "One, two, three," + shoal.select("a", [" four", " blue"]) + " then" + shoal.gen("b", max_tokens=4)

    state = choose.run(temperature=0)
    scores = state.get_meta_info("a")["input_token_logprobs"]
    assert state["a"] == " four" and scores[0][0][0] > scores[1][0][0] and state["b"]


ENDINGS = (  # everyday scenes in the manner of HellaSwag, the right ending first
    ("The man puts the bread into the toaster and pushes the lever down. He", "waits until the toast pops up.",
     "paints the toaster with a tall ladder.", "reads the ocean to his left shoe."),
    ("The girl climbs to the top of the slide in the playground. She", "sits down and slides to the bottom.",
     "plugs the slide into her bank account.", "boils the slide with two onions."),
    ("The woman fills the kettle with water and turns on the stove. She", "makes a cup of tea.",
     "drives the kettle to the moon by mail.", "combs the window into small letters."),
    ("The dog sees the ball fly across the lawn. It", "runs after the ball and brings it back.",
     "signs the ball with a blue mortgage.", "divides the lawn by seven violins."),
    ("It starts to rain while they walk home. They", "open an umbrella and walk faster.",
     "fold the street into a salad.", "translate the rain to their elbows."),
)  # fmt: skip


def test_the_likeliest_ending_of_a_scene() -> None:
    """Few shots, then a select of whole sentences, in a batch; each program says what it says alone."""

    @shoal.function
    def ending(s: Any, scene: str, endings: list[str]) -> None:
        s += "The boy gets onto his bike. He rides down the street.\n\n" + scene + shoal.select("ending", endings)

    given = []
    for number, (scene, *endings) in enumerate(ENDINGS):
        turned = endings[number % 3 :] + endings[: number % 3]
        given.append({"scene": scene, "endings": [f" {text}" for text in turned]})
    states = ending.run_batch(given, temperature=0)
    assert [state["ending"] for state in states] == [f" {right}" for _, right, *_ in ENDINGS]
    assert ending.run(**given[0], temperature=0)["ending"] == states[0]["ending"]


def test_numbers_and_types() -> None:
    @shoal.function
    def typed(s: Any) -> None:
        s += "The number of hours in a day is " + shoal.gen_int("hours", max_tokens=4) + "\n"
        s += "Pi is about " + shoal.gen("pi", dtype=float, max_tokens=8) + "\n"
        s += "The sky is blue: " + shoal.gen("blue", dtype=bool) + "\n"
        s += "A city: " + shoal.gen_string("city", max_tokens=16)

    state = typed.run(temperature=0)
    assert int(state["hours"]) >= 24 and 3 <= float(state["pi"]) < 4
    assert state["blue"] in ("True", "False") and json.loads(state["city"])


def test_regex_and_json() -> None:
    address = r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"
    schema = '{"type":"object","properties":{"n":{"type":"integer","maximum":99}},"required":["n"]}'

    @shoal.function
    def constrained(s: Any) -> None:
        s += "The address of Google's name server is " + shoal.gen("ip", regex=address, max_tokens=16) + "\n"
        s += "An object with a number: " + shoal.gen("json", json_schema=schema, max_tokens=24)

    state = constrained.run(temperature=0)
    assert re.fullmatch(address, state["ip"]) and isinstance(json.loads(state["json"])["n"], int)


def test_a_variable_is_used_at_once() -> None:
    @shoal.function
    def expert(s: Any, question: str) -> None:
        s += "Question: " + question + "\n"
        s += "A good person to ask is" + shoal.gen("expert", stop=[".", "\n"], max_tokens=8) + ".\n"
        s += "For example," + s["expert"] + " would answer" + shoal.gen("answer", stop=".", max_tokens=8) + "."

    state = expert.run("What is the capital of France?", temperature=0)
    assert state.text().count(state["expert"]) >= 2


def test_tools() -> None:
    @shoal.function
    def multiply(s: Any, a: int, b: int) -> None:
        s += "calculate(1*2)=2\ncalculate(3*4)=12\n"
        s += f"The product of {a} and {b} is calculate(" + shoal.gen("expression", regex=r"\d+\*\d+", stop=")") + ")="
        left, right = s["expression"].split("*")
        s += str(int(left) * int(right))

    state = multiply.run(25, 98, temperature=0, max_new_tokens=12)
    assert state.text().endswith(")=" + str(eval(state["expression"])))


def test_forks_share_their_prefix() -> None:
    @shoal.function
    def program(s: Any) -> None:
        s += "A story about a fish that " + shoal.gen("start", max_tokens=24) + "\n"
        forks = s.fork(3)
        forks += lambda i: f"Ending {i}:" + shoal.gen("ending", max_tokens=4)
        forks.join()
        s += "The endings were:" + ",".join(s["ending"])

    state = program.run(temperature=0)
    assert len(state["ending"]) == 3
    assert all(call.cached_tokens and call.cached_tokens >= 16 for call in state.calls() if call.name == "ending")


def test_texts_in_parallel() -> None:
    @shoal.function
    def program(s: Any, contexts: list[str]) -> None:
        s += "Statements:\n"
        forks = s.fork(len(contexts))
        forks += lambda i: f"{i}. {contexts[i]}\n"
        forks.join(mode="concate_and_append")
        s += "The color of the sea is" + shoal.gen("answer", max_tokens=4)

    state = program.run(["The color of the house is red.", "The color of the sea is green."], temperature=0)
    assert state.text().startswith(
        "Statements:\n0. The color of the house is red.\n1. The color of the sea is green.\n"
    )
    assert state.text().endswith("The color of the sea is" + state["answer"])


def test_streams_and_log_probabilities() -> None:
    program = shoal.function(lambda s: s.append("One, two, three," + shoal.gen("x", max_tokens=8)))
    whole = program.run(temperature=0, return_logprob=True, top_logprobs_num=2)
    streamed = program.run(temperature=0, return_logprob=True, top_logprobs_num=2, stream=True)
    assert "".join(streamed.text_iter("x")) == whole["x"]
    for state in (whole, streamed):
        meta = state.get_meta_info("x")
        assert "".join(text for _, _, text in meta["output_token_logprobs"]) == state["x"]
        assert all(len(top) == 2 for top in meta["output_top_logprobs"])


def test_stop_regex_and_min_tokens() -> None:
    @shoal.function
    def program(s: Any) -> None:
        s += "1 2 3 4 5 6" + shoal.gen("x", max_tokens=16, stop_regex=r" [89]") + "|"
        s += shoal.gen("y", max_tokens=8, min_tokens=8, ignore_eos=True)

    state = program.run(temperature=0)
    assert state["x"] == " 7" and state.get_meta_info("y")["completion_tokens"] == 8


# ---------------------------------------------------------------- examples


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here() -> None:
    tested = set(re.findall(r'example\("(\w+)"\)', Path(__file__).read_text()))
    assert tested == {path.stem for path in EXAMPLES.glob("*.py")}


def test_example_few_shot() -> None:
    answers = example("few_shot").main()
    assert answers["Portugal"] == "Lisbon" and answers["Norway"] == "Oslo"


@pytest.mark.usefixtures("brief")
def test_example_essay_judge() -> None:
    state = example("essay_judge").main()
    assert state["grade"] in "ABCD" and len(state["judgement"]) == 3


def test_example_react() -> None:
    text = example("react").main().text()
    assert re.search(r"Action 1: (Search|Finish) \[", text)


@pytest.mark.usefixtures("brief")
def test_example_tree_of_thought() -> None:
    state = example("tree_of_thought").main()
    assert state["best"] in "0123" and len(state.calls()) == 7


@pytest.mark.usefixtures("brief")
def test_example_skeleton_of_thought() -> None:
    state = example("skeleton_of_thought").main()
    assert len(state["detail"]) == 3 and state.text().endswith(state["summary"])


@pytest.mark.usefixtures("brief")
def test_example_multi_turn() -> None:
    module = example("multi_turn")
    assert "".join(module.main(stream=True).text_iter()) == module.main().text()


def test_example_json_fields() -> None:
    facts = example("json_fields").main()
    assert isinstance(facts["population"], int) and isinstance(facts["on_the_sea"], bool)


def test_example_rag() -> None:
    assert len(example("rag").main()) == 3
