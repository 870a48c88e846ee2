"""OpenAI's protocol, by its own client, on a scripted endpoint."""

import asyncio
import sys

import pytest

import shoal
from tests.shoal.lang.scripted_endpoint import ScriptedEndpoint, script, tokenize

CAPITAL = "Q: What is the capital of France?\nA:"
CHAT = "<user>Say it.<assistant>"


@pytest.fixture
def endpoint():
    answers = {CAPITAL: " Paris.\nQ: And of Italy?\nA: Rome.\n", CHAT: "Paris, of course. Or so it is said."}
    with ScriptedEndpoint(script(answers)) as server:
        yield server


def completions(endpoint, **arguments):
    return shoal.OpenAI("scripted", is_chat_model=False, base_url=f"{endpoint.url}/v1", api_key="key", **arguments)


def chat(endpoint, **arguments):
    return shoal.OpenAI("scripted", base_url=f"{endpoint.url}/v1", api_key="key", **arguments)


@shoal.function
def ask(s):
    s += CAPITAL + shoal.gen("answer", stop="\n")


@shoal.function
def talk(s):
    s += shoal.system("Be brief.")
    s += shoal.user("Say it.")
    s += shoal.assistant(shoal.gen("answer", stop="."))


def program(*parts):
    """A program of these expressions."""

    def run(s):
        for part in parts:
            s += part

    return shoal.function(run)


def test_a_text_is_completed_up_to_its_stop(endpoint):
    backend = completions(endpoint)
    state = ask.run(backend=backend, temperature=0)
    assert state["answer"] == " Paris."
    assert endpoint.requests == [
        (
            "/v1/completions",
            {"model": "scripted", "prompt": CAPITAL, "max_tokens": 128, "temperature": 0, "stop": ["\n"]},
        )
    ]
    meta = state.get_meta_info("answer")
    assert meta["finish_reason"] == "stop"
    assert meta["prompt_tokens"] == len(tokenize(CAPITAL))
    assert (backend.token_usage.calls, backend.token_usage.prompt_tokens) == (1, meta["prompt_tokens"])
    assert backend.token_usage.completion_tokens == 3  # the line's end with them


def test_a_conversation_goes_as_messages(endpoint):
    state = talk.run(backend=chat(endpoint))
    (body,) = endpoint.bodies
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say it."},
    ]
    assert body["max_tokens"] == 128 and body["stop"] == ["."] and "top_p" not in body
    assert state["answer"] == "Paris, of course"
    assert state.messages()[-1] == {"role": "assistant", "content": "Paris, of course"}


def test_openai_itself_gets_the_newer_name_of_max_tokens(endpoint):
    backend = shoal.OpenAI("gpt-4o", api_key="key")
    assert backend._max_tokens == "max_completion_tokens"
    azure = shoal.OpenAI("gpt-4o", is_azure=True, azure_endpoint=endpoint.url, api_version="2026-01-01", api_key="key")
    assert azure._max_tokens == "max_completion_tokens"
    assert chat(endpoint)._max_tokens == "max_tokens"


def test_models_that_take_texts_are_known_by_name():
    assert not shoal.OpenAI("gpt-3.5-turbo-instruct", api_key="key").is_chat_model
    assert shoal.OpenAI("gpt-4o", api_key="key").is_chat_model


@pytest.mark.parametrize("kind", [completions, chat])
def test_a_stream_gives_the_same_in_pieces(endpoint, kind):
    function, backend = (ask, kind(endpoint)) if kind is completions else (talk, kind(endpoint))
    plain = function.run(backend=backend)
    once = dict(vars(backend.token_usage))
    state = function.run(backend=backend, stream=True)
    assert "".join(state.text_iter("answer")) == plain["answer"] == state["answer"]
    assert state.get_meta_info("answer")["finish_reason"] == "stop"
    assert endpoint.bodies[1] == endpoint.bodies[0] | {"stream": True, "stream_options": {"include_usage": True}}
    assert state.error() is None
    assert vars(backend.token_usage) == {name: 2 * value for name, value in once.items()}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion(endpoint, stream):
    function = program(CAPITAL, shoal.gen("answer", max_tokens=2, return_logprob=True, top_logprobs_num=1))
    meta = function.run(backend=completions(endpoint), stream=stream).get_meta_info("answer")
    assert meta["output_token_logprobs"] == [(-6.0, None, " Paris"), (-1.0, None, ".")]
    assert meta["output_top_logprobs"] == [[(-6.0, None, " Paris")], [(-1.0, None, ".")]]
    assert meta["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(endpoint, stream):
    function = program(shoal.user("Say it."), shoal.assistant(shoal.gen("answer", max_tokens=1, return_logprob=True)))
    meta = function.run(backend=chat(endpoint), stream=stream).get_meta_info("answer")
    assert meta["output_token_logprobs"] == [(-5.0, None, "Paris")]


def test_several_outputs_of_one_call(endpoint):
    state = program(CAPITAL, shoal.gen("answer", n=3, max_tokens=2)).run(backend=completions(endpoint))
    assert state["answer"] == [" Paris."] * 3
    assert [meta["finish_reason"] for meta in state.get_meta_info("answer")] == ["length"] * 3


def test_a_regular_expression_ends_an_output(endpoint):
    state = program(CAPITAL, shoal.gen("answer", stop_regex=r"[.!]")).run(backend=completions(endpoint))
    assert state["answer"] == " Paris"


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"regex": "a+"}, "regex"), ({"dtype": int}, "dtype"), ({"top_k": 3}, "top_k"), ({"json_schema": "{}"}, "json")],
)
def test_what_openai_has_no_parameter_for_is_refused_by_name(endpoint, asked, named):
    with pytest.raises(shoal.ProgramError, match=f"support {named}"):
        program(CAPITAL, shoal.gen("answer", **asked)).run(backend=completions(endpoint))
    assert endpoint.requests == []


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (shoal.assistant("It is " + shoal.gen("answer")), "text before gen"),
        (shoal.user(shoal.video(b"....ftyp", 4)), "support video"),
        (shoal.assistant("It is " + shoal.select("answer", ["yes", "no"])), "text before gen"),
        (shoal.select("answer", ["yes", "no"]), "within assistant"),
        (
            shoal.assistant(
                shoal.select("answer", ["a", "b"], choices_method=shoal.unconditional_likelihood_normalized)
            ),
            "choices_method",
        ),
    ],
)
def test_what_a_plain_chat_endpoint_cannot_do_is_refused_by_name(endpoint, part, message):
    with pytest.raises(shoal.ProgramError, match=message):
        program(shoal.user("Say it."), part).run(backend=chat(endpoint))
    assert endpoint.requests == []


def test_a_schema_goes_as_response_format(endpoint):
    function = program(shoal.user("Say it."), shoal.assistant(shoal.gen("answer", json_schema='{"type": "object"}')))
    function.run(backend=chat(endpoint))
    assert endpoint.bodies[0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }


@pytest.mark.parametrize(
    ("dialect", "asked", "sent"),
    [
        ("vllm", {"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ("vllm", {"dtype": bool}, {"structured_outputs": {"regex": "(True|False)"}}),
        ("vllm", {"json_schema": "{}"}, {"structured_outputs": {"json": {}}}),
        ("sglang", {"regex": "a+"}, {"regex": "a+"}),
        ("sglang", {"json_schema": "{}"}, {"json_schema": "{}"}),
        ("vllm", {"top_k": 3, "min_p": 0.1, "min_tokens": 2}, {"top_k": 3, "min_p": 0.1, "min_tokens": 2}),
        ("vllm", {"stop_token_ids": [7], "ignore_eos": True}, {"stop_token_ids": [7], "ignore_eos": True}),
    ],
)
def test_dialects_take_more(endpoint, dialect, asked, sent):
    backend = completions(endpoint, dialect=dialect, extra_body={"seed": 5})
    program(CAPITAL, shoal.gen("answer", **asked)).run(backend=backend)
    (body,) = endpoint.bodies
    assert {name: body[name] for name in sent} == sent
    assert body["seed"] == 5 and body["top_p"] == 1.0


def test_an_unknown_dialect_is_refused():
    with pytest.raises(ValueError, match="dialect is 'mine'"):
        shoal.OpenAI("scripted", api_key="key", dialect="mine")


def test_an_open_endpoint_continues_a_message(endpoint):
    state = program(
        shoal.user("Say it."), shoal.assistant("Paris, " + shoal.gen("how", stop=".") + ". Or" + shoal.gen("more"))
    ).run(backend=chat(endpoint, dialect="vllm"))
    assert (state["how"], state["more"]) == ("of course", " so it is said.")
    assert [body["messages"][-1]["content"] for body in endpoint.bodies] == ["Paris, ", "Paris, of course. Or"]
    assert all(body["continue_final_message"] and not body["add_generation_prompt"] for body in endpoint.bodies)


def test_pictures_and_films_go_as_parts(endpoint):
    message = shoal.user(shoal.image("https://host/a.png") + "What is it?" + shoal.video(b"....ftyp", 4))
    for dialect in ("vllm", "sglang"):
        program(message, shoal.assistant(shoal.gen("answer"))).run(backend=chat(endpoint, dialect=dialect))
    url = "data:video/mp4;base64,Li4uLmZ0eXA="
    parts = [
        {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
        {"type": "text", "text": "What is it?"},
    ]
    vllm, sglang = endpoint.bodies
    assert vllm["messages"][0]["content"] == [*parts, {"type": "video_url", "video_url": {"url": url}}]
    assert vllm["media_io_kwargs"] == {"video": {"num_frames": 4}}
    assert sglang["messages"][0]["content"] == [
        *parts,
        {"type": "video_url", "video_url": {"url": url, "max_frames": 4}},
    ]


def test_vllm_takes_one_number_of_pictures(endpoint):
    message = shoal.user(shoal.video(b"....ftyp", 4) + shoal.video(b"....ftyp", 8))
    with pytest.raises(shoal.ProgramError, match="num_frames"):
        program(message, shoal.assistant(shoal.gen("answer"))).run(backend=chat(endpoint, dialect="vllm"))


def test_select_scores_the_tokens_that_reach_into_a_choice(endpoint):
    """The space before a word is part of its token: the tokens of `A: yes` are `A`, `:` and ` yes`."""
    backend = completions(endpoint, dialect="vllm")
    state = program("Q\nA: ", shoal.select("answer", ["certainly", "no", "yes"])).run(backend=backend)
    assert state["answer"] == "no"
    meta = state.get_meta_info("answer")
    assert meta["input_token_logprobs"] == [[(-10.0, None, None)], [(-3.0, None, None)], [(-4.0, None, None)]]
    (body,) = endpoint.bodies
    assert body["prompt"] == ["Q\nA: certainly", "Q\nA: no", "Q\nA: yes"]
    assert body["echo"] and body["max_tokens"] == 0
    assert backend.token_usage.calls == 1


@pytest.mark.parametrize(("dialect", "before"), [("openai", ""), ("vllm", "It is")])
def test_select_in_a_conversation_takes_choices_of_one_token(endpoint, dialect, before):
    endpoint.answer = lambda prompt: " yes" if before else "yes"
    endpoint.alternatives = {"no": -0.5, " no": -0.5, "maybe": -9.0}
    backend = chat(endpoint, dialect=dialect)
    choices = shoal.select("answer", [" yes", " no"])
    state = program(shoal.user("Is it?"), shoal.assistant(before + choices)).run(backend=backend)
    assert state["answer"] == " no" and state.messages()[1]["content"] == (before + " no").lstrip()
    assert state.get_meta_info("answer")["values"] == [-4.0 if before else -3.0, -0.5]
    (body,) = endpoint.bodies
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"], body["temperature"]) == (1, True, 20, 0)
    with pytest.raises(shoal.ProgramError, match="likely 'never'"):
        program(shoal.user("Is it?"), shoal.assistant(shoal.select("answer", ["no", "never"]))).run(backend=backend)


def test_select_by_what_the_prompt_gains(endpoint):
    choices = shoal.select("answer", ["x y", "longer"], choices_method=shoal.unconditional_likelihood_normalized)
    state = program("Q:", choices).run(backend=completions(endpoint, dialect="vllm"))
    # The first token has no probability of its own: what counts is x y: (-1 - 2 + 2) / 2; longer: -6.
    assert state["answer"] == "x y"
    assert endpoint.bodies[1]["prompt"] == ["x y", "longer"]


def test_select_with_nothing_before_it_is_refused(endpoint):
    with pytest.raises(shoal.ProgramError, match="needs a text before it"):
        program(shoal.select("answer", ["a", "b"])).run(backend=completions(endpoint, dialect="vllm"))


def test_a_busy_endpoint_is_asked_again(endpoint):
    endpoint.failures += [(429, {"retry-after-ms": "1"}), (503, {"retry-after-ms": "1"})]
    assert ask.run(backend=completions(endpoint))["answer"] == " Paris."
    assert endpoint.failures == []


def test_an_error_names_its_status_and_the_line(endpoint):
    endpoint.failures += [(400, {})]
    with pytest.raises(shoal.ProgramError, match=r"test_openai.py:\d+.*not now") as raised:
        ask.run(backend=completions(endpoint))
    assert isinstance(raised.value.__cause__, shoal.BackendError)
    assert (raised.value.__cause__.status, raised.value.__cause__.code) == (400, "busy")


def test_an_endpoint_that_is_not_there_is_named():
    with ScriptedEndpoint(script({})) as gone:
        url = gone.url
    backend = shoal.OpenAI("scripted", False, base_url=url, api_key="key", max_retries=0)
    with pytest.raises(shoal.ProgramError, match=url):
        ask.run(backend=backend)


def test_each_event_loop_has_its_own_client(endpoint):
    backend = completions(endpoint)

    async def one():
        state = await ask.run_async(backend=backend)
        client = backend._clients.get()
        await backend.close()
        return state["answer"], client

    (first, client), (second, other) = asyncio.run(one()), asyncio.run(one())
    assert first == second == " Paris." and client is not other


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match="pip install openai"):
        shoal.OpenAI("scripted", api_key="key")


@pytest.mark.slow
def test_a_batch_counts_its_tokens(endpoint):
    backend = completions(endpoint)
    states = ask.run_batch([{}] * 20, backend=backend)
    assert [state["answer"] for state in states] == [" Paris."] * 20
    assert backend.token_usage.calls == 20
    assert backend.token_usage.prompt_tokens == 20 * len(tokenize(CAPITAL))
