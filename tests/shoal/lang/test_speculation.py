"""API speculative execution: what it saves, and that no variable differs from a plain run."""

import asyncio
import dataclasses
import random
import re
import zlib

import pytest

import shoal
from shoal.lang.backend import Backend, Generated, OutputPiece
from shoal.lang.ir import GenParams
from shoal.lang.speculation import MAX_TRIES, Speculation
from tests.shoal.lang.scripted_endpoint import ScriptedEndpoint, script, tokenize

PROMPT = "Ada Lovelace was born in 1815 and wrote programs.\nName:"
ANSWER = " Ada Lovelace\nYear: 1815\nWork: programs\n\nName: Bob"
CHAT = "<user>Who?<assistant>"
MESSAGE = "Name: Ada Lovelace\nYear: 1815\nWork: programs"


def extraction(s, name_tokens=None, sampling=None):
    own = sampling or {}
    s += PROMPT + shoal.gen("name", stop="\n", max_tokens=name_tokens, **own)
    s += "\nYear:" + shoal.gen("year", stop="\n", **own)
    s += "\nWork:" + shoal.gen("work", stop="\n", **own)


plain = shoal.function(extraction)
speculated = shoal.function(extraction, num_api_spec_tokens=32)


@pytest.fixture
def endpoint():
    with ScriptedEndpoint(script({PROMPT: ANSWER, CHAT: MESSAGE})) as server:
        yield server


def completions(endpoint, **arguments):
    return shoal.OpenAI("scripted", is_chat_model=False, base_url=f"{endpoint.url}/v1", api_key="key", **arguments)


def chat(endpoint, **arguments):
    return shoal.OpenAI("scripted", base_url=f"{endpoint.url}/v1", api_key="key", **arguments)


def values(state, names=("name", "year", "work")):
    return [state[name] for name in names]


# ---------------------------------------------------------------- what it saves


@pytest.mark.parametrize("stream", [False, True])
def test_three_outputs_of_one_call(endpoint, stream):
    backend = completions(endpoint)
    expected = plain.run(backend=backend, temperature=0)
    state = speculated.run(backend=backend, temperature=0, stream=stream)
    assert values(state) == values(expected) == [" Ada Lovelace", " 1815", " programs"]
    assert state.text() == expected.text()
    state.error()
    assert len(endpoint.requests) == 3 + 1
    assert [state.get_meta_info(name)["speculated"] for name in ("name", "year", "work")] == [False, True, True]
    assert all(state.get_meta_info(name)["finish_reason"] == "stop" for name in ("name", "year", "work"))
    body = endpoint.bodies[3]
    assert "stop" not in body and body["max_tokens"] == 128  # what run asks for, which is more than 32


def test_the_usage_says_what_was_saved(endpoint):
    backend = completions(endpoint)
    plain.run(backend=backend, temperature=0)
    usage = dataclasses.replace(backend.token_usage)
    backend.token_usage.reset()
    speculated.run(backend=backend, temperature=0)
    assert (usage.calls, backend.token_usage.calls) == (3, 1)
    assert usage.prompt_tokens >= 3 * backend.token_usage.prompt_tokens


def test_a_stream_gives_pieces_before_the_answer_ends(endpoint):
    """The output of the call grows; later ones come from what it left."""
    state = speculated.run(backend=completions(endpoint), stream=True, temperature=0)
    assert "".join(state.text_iter("work")) == " programs"
    assert "".join(state.text_iter()) == state.text()


def test_a_constant_that_differs_makes_a_call_of_its_own(endpoint):
    @shoal.function(num_api_spec_tokens=64)
    def other(s):
        s += PROMPT + shoal.gen("name", stop="\n") + "\nYear:" + shoal.gen("year", stop="\n")
        s += "\nPlace:" + shoal.gen("place", stop="\n")

    state = other.run(backend=completions(endpoint), temperature=0)
    assert (state["name"], state["year"], state["place"]) == (" Ada Lovelace", " 1815", "")
    assert [body["prompt"] for body in endpoint.bodies] == [PROMPT, PROMPT + " Ada Lovelace\nYear: 1815\nPlace:"]
    assert not state.get_meta_info("place")["speculated"]


def test_a_variable_that_the_program_changes_is_not_ignored(endpoint):
    @shoal.function(num_api_spec_tokens=64)
    def other(s):
        s += PROMPT + shoal.gen("name", stop="\n")
        s += "!" if s["name"] else ""
        s += "\nYear:" + shoal.gen("year", stop="\n")

    other.run(backend=completions(endpoint), temperature=0)
    assert len(endpoint.requests) == 2


# ---------------------------------------------------------------- lengths


def test_the_length_is_counted_in_tokens(endpoint):
    """A draft is longer than a gen may be: its tokens say where the gen ends."""
    for run in (plain, speculated):
        state = run.run(backend=completions(endpoint), temperature=0, name_tokens=1)
        assert state["name"] == " Ada"
        assert state.get_meta_info("name")["finish_reason"] == "length"
    assert endpoint.bodies[3]["max_tokens"] == 32


def test_tokens_that_the_endpoint_refuses_are_asked_for_once(endpoint):
    endpoint.refused = frozenset({"logprobs"})
    backend = completions(endpoint)
    assert values(speculated.run(backend=backend, temperature=0)) == [" Ada Lovelace", " 1815", " programs"]
    assert ["logprobs" in body for body in endpoint.bodies] == [True, False]
    speculated.run(backend=backend, temperature=0)
    assert len(endpoint.requests) == 3


def test_without_tokens_a_length_that_is_not_certain_makes_a_plain_call(endpoint):
    endpoint.refused = frozenset({"logprobs"})
    backend = completions(endpoint)
    for tokens, calls in ((14, 2), (13, 3)):  # 14 bytes with the line's end, so 14 tokens at the most
        endpoint.requests.clear()
        backend.tells_tokens = True
        state = speculated.run(backend=backend, temperature=0, name_tokens=tokens)
        assert values(state) == [" Ada Lovelace", " 1815", " programs"]
        assert len(endpoint.requests) == calls
    assert endpoint.bodies[-1]["max_tokens"] == 13 and endpoint.bodies[-1]["stop"] == ["\n"]


def test_a_draft_that_was_cut_off_serves_no_end(endpoint):
    """Five tokens are Ada Lovelace, Year and its colon: the year is not among them."""

    @shoal.function(num_api_spec_tokens=5)
    def short(s):
        s += PROMPT + shoal.gen("name", stop="\n", max_tokens=5) + "\nYear:"
        s += shoal.gen("year", stop="\n", max_tokens=5)

    state = short.run(backend=completions(endpoint), temperature=0)
    assert (state["name"], state["year"]) == (" Ada Lovelace", " 1815")
    assert len(endpoint.requests) == 2 and not state.get_meta_info("year")["speculated"]


def test_an_output_within_a_token_is_not_served(endpoint):
    """A model that is asked after `Year: ` may say something else than in the middle of ` 1815`."""

    @shoal.function(num_api_spec_tokens=32)
    def spaced(s):
        s += PROMPT + shoal.gen("name", stop="\n") + "\nYear: " + shoal.gen("year", stop="\n")

    assert spaced.run(backend=completions(endpoint), temperature=0)["year"] == "1815"
    assert len(endpoint.requests) == 2
    endpoint.refused = frozenset({"logprobs"})
    endpoint.requests.clear()
    assert spaced.run(backend=completions(endpoint), temperature=0)["year"] == "1815"
    assert len(endpoint.requests) == 3  # with the one that was refused


# ---------------------------------------------------------------- other parameters


@pytest.mark.parametrize(
    "sampling",
    [{"presence_penalty": 0.5}, {"return_logprob": True}, {"stop_regex": "x+"}, {"n": 2}, {"temperature": 0.7}],
    ids=lambda sampling: next(iter(sampling)),
)
def test_calls_with_other_parameters_are_made_as_they_are(endpoint, sampling):
    @shoal.function(num_api_spec_tokens=32)
    def mixed(s):
        s += PROMPT + shoal.gen("name", stop="\n")
        s += "\nYear:" + shoal.gen("year", stop="\n", **sampling)

    mixed.run(backend=completions(endpoint), temperature=0)
    assert len(endpoint.requests) == 2


def test_forks_inherit_the_rest(endpoint):
    @shoal.function(num_api_spec_tokens=32)
    def forked(s):
        s += PROMPT + shoal.gen("name", stop="\n")
        forks = s.fork(3)
        forks += "\nYear:"
        forks += shoal.gen("year", stop="\n")
        forks[1] += "\nWork:" + shoal.gen("work", stop="\n")
        forks[2] += "\nPlace:" + shoal.gen("place", stop="\n")
        forks.join()

    state = forked.run(backend=completions(endpoint), temperature=0)
    assert state["year"] == [" 1815"] * 3 and state["work"] == [" programs"]
    assert len(endpoint.requests) == 2  # the place
    endpoint.requests.clear()
    forked.run(backend=completions(endpoint), temperature=0.7)
    assert len(endpoint.requests) == 1 + 3 + 1  # by chance, each fork has its own


def test_where_calls_cost_no_text_nothing_is_over_generated():
    server = shoal.ShoalServer("http://127.0.0.1:1")
    assert server.speculating(32) is server


def test_the_number_of_tokens_is_checked(endpoint):
    with pytest.raises(ValueError, match="num_api_spec_tokens"):
        completions(endpoint).speculating(0)


# ---------------------------------------------------------------- conversations


@shoal.function(num_api_spec_tokens=32)
def talk(s):
    s += shoal.user("Who?")
    with s.assistant():
        s += "Name:" + shoal.gen("name", stop="\n") + "\nYear:" + shoal.gen("year", stop="\n")
        s += "\nWork:" + shoal.gen("work")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["openai", "anthropic", "vllm"])
def test_one_call_for_a_message_of_several_outputs(endpoint, kind, stream):
    if kind == "anthropic":
        backend = shoal.Anthropic("scripted", base_url=endpoint.url, api_key="key")
    else:
        backend = chat(endpoint, dialect=kind)
    state = talk.run(backend=backend, temperature=0 if kind != "anthropic" else None, stream=stream)
    assert values(state) == [" Ada Lovelace", " 1815", " programs"]
    assert state.messages()[-1] == {"role": "assistant", "content": MESSAGE}
    assert len(endpoint.requests) == 1
    assert endpoint.bodies[0]["messages"][0] == {"role": "user", "content": "Who?"}


def test_white_space_before_a_message_does_not_count():
    with ScriptedEndpoint(script({CHAT: "\n\n" + MESSAGE})) as endpoint:
        assert values(talk.run(backend=chat(endpoint))) == [" Ada Lovelace", " 1815", " programs"]


def test_an_answer_without_the_program_s_text_is_an_error():
    with ScriptedEndpoint(script({CHAT: "Name: Ada\nBorn: 1815"})) as endpoint:
        state = talk.run_batch([{}], backend=chat(endpoint), temperature=0)[0]
        assert state["name"] == " Ada"
        error = str(state.error())
        assert re.search(r"test_speculation.py:\d+.*'Year:'.*'Born: 1815'", error), error
        with pytest.raises(shoal.ProgramError):
            state["year"]
        assert len(endpoint.requests) == MAX_TRIES


def test_a_message_is_asked_for_until_all_of_it_fits():
    answers = iter(["No.", "Name: Ada\nBorn: 1815", MESSAGE])
    with ScriptedEndpoint(lambda prompt: next(answers)) as endpoint:
        state = talk.run(backend=chat(endpoint))
        assert values(state) == [" Ada Lovelace", " 1815", " programs"]
        assert len(endpoint.requests) == 3


def test_a_message_that_is_cut_off_is_asked_for_with_more():
    @shoal.function(num_api_spec_tokens=8)
    def small(s):
        s += shoal.user("Who?")
        part = shoal.gen("name", stop="\n", max_tokens=8) + "\nYear:" + shoal.gen("year", stop="\n", max_tokens=8)
        s += shoal.assistant("Name:" + part)

    with ScriptedEndpoint(script({CHAT: MESSAGE})) as endpoint:
        state = small.run(backend=chat(endpoint), temperature=0)
        assert (state["name"], state["year"]) == (" Ada Lovelace", " 1815")
        assert [body["max_tokens"] for body in endpoint.bodies] == [8, 16]


def test_a_message_that_is_always_cut_off_is_an_error():
    @shoal.function(num_api_spec_tokens=8)
    def long(s):
        s += shoal.user("Who?") + shoal.assistant("word " * 40 + shoal.gen("name", max_tokens=8))

    with ScriptedEndpoint(script({CHAT: "word " * 50})) as endpoint:
        with pytest.raises(shoal.ProgramError, match="32 tokens"):
            long.run(backend=chat(endpoint), temperature=0)
        assert [body["max_tokens"] for body in endpoint.bodies] == [8, 16, 32]


def test_a_length_that_is_not_certain_is_an_error_where_no_call_can_decide(endpoint):
    endpoint.refused = frozenset({"logprobs"})

    @shoal.function(num_api_spec_tokens=32)
    def short(s):
        s += shoal.user("Who?") + shoal.assistant("Name:" + shoal.gen("name", stop="\n", max_tokens=4))

    with pytest.raises(shoal.ProgramError, match=r"max_tokens of 4\b.*\b32\b"):
        short.run(backend=chat(endpoint), temperature=0)


def test_a_length_that_is_not_certain_makes_a_plain_call_where_a_message_begins(endpoint):
    endpoint.refused = frozenset({"logprobs"})

    @shoal.function(num_api_spec_tokens=32)
    def short(s):
        s += shoal.user("Who?")
        s += shoal.assistant(shoal.gen("name", stop="\n", max_tokens=3) + "\nYear:" + shoal.gen("year"))

    state = short.run_batch([{}], backend=chat(endpoint), temperature=0)[0]
    assert state["name"] == "Name: Ada"
    assert "whether" not in str(state.error()) and "text is '\\nYear:'" in str(state.error())


def test_a_constraint_cannot_stand_in_the_middle_of_a_message(endpoint):
    @shoal.function(num_api_spec_tokens=32)
    def constrained(s):
        s += shoal.user("Who?") + shoal.assistant("Name:" + shoal.gen("name", presence_penalty=0.5))

    with pytest.raises(shoal.ProgramError, match="presence_penalty must come first"):
        constrained.run(backend=chat(endpoint))


def test_the_next_message_has_its_own_call():
    second = f"{CHAT}{MESSAGE}<user>And?<assistant>"
    with ScriptedEndpoint(script({CHAT: MESSAGE, second: "Name: Bob"})) as endpoint:

        @shoal.function(num_api_spec_tokens=32)
        def twice(s):
            s += shoal.user("Who?") + shoal.assistant(shoal.gen("first"))
            s += shoal.user("And?") + shoal.assistant("Name:" + shoal.gen("second"))

        state = twice.run(backend=chat(endpoint), temperature=0)
        assert (state["first"], state["second"]) == (MESSAGE, " Bob")
        assert len(endpoint.requests) == 2


# ---------------------------------------------------------------- ends of a run


def test_a_run_ends_when_its_answers_have_been_counted(endpoint):
    @shoal.function(num_api_spec_tokens=400)
    def first_word(s):
        s += PROMPT + shoal.gen("name", stop=" Lovelace", max_tokens=400)

    backend = completions(endpoint)
    state = first_word.run(backend=backend, temperature=0, stream=True)
    assert state["name"] == " Ada"
    state.error()
    shoal.lang.loop.wait(_ended(state), state.run.loop)
    assert backend.token_usage.completion_tokens == len(tokenize(ANSWER))


async def _ended(state):
    await state.run.task


def test_a_cancelled_run_ends_its_answers():
    class Endless(TokenModel):
        closed = 0

        async def stream(self, call):
            try:
                yield OutputPiece(" a\n b")
                await asyncio.Event().wait()
            finally:
                self.closed += 1

    @shoal.function(num_api_spec_tokens=400)
    def two(s):
        s += "S:" + shoal.gen("first", stop="\n", max_tokens=400) + "\n"
        s += shoal.gen("second", stop="\n", max_tokens=400)

    async def run(backend):
        state = await two.run_async(backend=backend, stream=True)
        assert "".join([piece async for piece in state.text_async_iter("first")]) == " a"
        state.run.task.cancel()
        await asyncio.wait([state.run.task], timeout=30)
        assert state.run.task.done()

    backend = Endless(1, False)
    asyncio.run(run(backend))
    assert backend.closed == 1


def test_a_message_is_looked_at_when_enough_of_it_has_come():
    class CharacterByCharacter(TokenModel):
        features = frozenset({"stream"})
        calls = 0

        async def stream(self, call):
            self.calls += 1
            for character in MESSAGE:
                await asyncio.sleep(0)
                yield OutputPiece(character)
            yield OutputPiece("", {"finish_reason": "stop", "completion_tokens": 12})

    backend = CharacterByCharacter(1, False, is_chat_model=True)
    state = talk.run(backend=backend, stream=True, temperature=0)
    assert state.text().endswith(f"ASSISTANT:{MESSAGE}\n")
    assert values(state) == [" Ada Lovelace", " 1815", " programs"]
    assert backend.calls == 1


def test_a_failed_call_is_the_program_s_error(endpoint):
    for stream in (False, True):
        endpoint.failures += [(404, {})]
        with pytest.raises(shoal.ProgramError, match="404"):
            speculated.run(backend=completions(endpoint), stream=stream)["name"]


# ---------------------------------------------------------------- any program, any text


class TokenModel(Backend):
    """A model whose next token follows from the tokens before it. Text that begins in the middle of a token is followed
    by something else."""

    name = "a model of tokens"
    params = frozenset(GenParams.__dataclass_fields__)
    features = frozenset({"stream", "prefill"})
    WORDS = (" a", " b", " ab", "\n", ".", ":", "\n\n", " é", "")  # the last one ends the answer

    def __init__(self, seed, tells_tokens, is_chat_model=False):
        super().__init__()
        self.seed = seed
        self.tells_tokens = tells_tokens
        self.is_chat_model = is_chat_model

    def tokens(self, text, limit):
        history = re.findall(r" [a-zé]+|\n+|.", text)
        for _ in range(limit):
            number = zlib.crc32("|".join([str(self.seed), *history[-3:]]).encode())
            word = self.WORDS[number % len(self.WORDS)]
            if not word:
                return
            yield word
            history = re.findall(r" [a-zé]+|\n+|.", "".join([*history[-4:], word]))

    async def generate(self, call):
        params, text, tokens, reason = call.params, "", [], None
        before = f"S:{call.partial}" if self.is_chat_model else call.text
        for token in self.tokens(before, params.max_new_tokens):
            tokens.append(token)
            text += token
            ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in params.stop or () if stop in text]
            if ends:
                text, reason = text[: min(ends)[1]], "stop"
                break
        reason = reason or ("length" if len(tokens) == params.max_new_tokens else "stop")
        meta = {"finish_reason": reason, "completion_tokens": len(tokens), "prompt_tokens": len(call.text)}
        self.token_usage.add(meta)
        if params.return_logprob:
            meta["output_token_logprobs"] = [(-1.0, None, token) for token in tokens]
        return Generated([text], [meta])

    async def stream(self, call):
        result = await self.generate(call)
        (text,), (meta,) = result.texts, result.meta
        tokens = meta.pop("output_token_logprobs", [])
        for at in range(0, len(text), 3):
            yield OutputPiece(text[at : at + 3], {"output_token_logprobs": tokens[at : at + 3]} if tokens else {})
        yield OutputPiece("", meta | ({"output_token_logprobs": tokens[len(text) + 2 :]} if tokens else {}))

    def speculating(self, num_tokens):
        return Speculation(self, num_tokens)


def random_program(random, model):
    """Steps of a program: half of its constants are what the model says anyway."""
    steps, text = [], "S:"
    for number in range(4):
        stops = random.sample(["\n", ".", " b", "\n\n", ":", ". a"], random.randint(0, 2))
        limit = random.choice([1, 2, 3, 5, 8, 20])
        said = "".join(model.tokens(text, 12))
        cut = min([said.find(stop) for stop in stops if stop in said], default=len(said))
        text += said[:cut]
        constant = random.choice([said[cut : cut + random.randint(0, 6)], random.choice([".", "\n:", " a", ""])])
        steps.append((f"v{number}", stops, limit, constant))
        text += constant
    return steps


@pytest.mark.parametrize("tells_tokens", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat_model", [False, True])
def test_no_variable_differs_from_a_plain_run(tells_tokens, stream, is_chat_model):
    saved = 0
    for seed in range(100):
        choose = random.Random(seed)
        model = TokenModel(seed, tells_tokens, is_chat_model)
        steps = random_program(choose, model)

        def program(s, steps):
            s += shoal.assistant_begin() if is_chat_model else "S:"
            for name, stops, limit, constant in steps:
                s += shoal.gen(name, stop=stops, max_tokens=limit) + constant
            s += shoal.assistant_end() if is_chat_model else ""

        expected = shoal.function(program).run(steps, backend=model, temperature=0)
        calls = model.token_usage.calls
        model.token_usage.reset()
        tokens = choose.choice([1, 4, 16, 60])
        state = shoal.function(program, num_api_spec_tokens=tokens).run(
            steps, backend=model, temperature=0, stream=stream
        )
        found = {name: (state[name], state.get_meta_info(name)["finish_reason"]) for name, *_ in steps}
        assert found == {name: (expected[name], expected.get_meta_info(name)["finish_reason"]) for name, *_ in steps}, (
            seed,
            steps,
            tokens,
        )
        saved += calls - model.token_usage.calls
    assert saved > 0
