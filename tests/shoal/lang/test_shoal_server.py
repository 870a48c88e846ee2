"""The Shoal server as a backend: what it is sent, what is sent again, and what its errors become."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

import shoal
from shoal.lang.backend import Call, Generated
from shoal.lang.backends import patience
from shoal.lang.backends.templates import TemplateRuns
from shoal.lang.ir import GenParams

WAIT_S = 10.0
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


class FakeServer:
    """Answers as a Shoal server does, by holding what branches hold. `broken` answers instead while it returns one."""

    def __init__(self, broken: Callable[[httpx.Request], httpx.Response | None] = lambda request: None) -> None:
        self.broken = broken
        self.bodies: list[dict[str, Any]] = []
        self.prompts: list[str] = []  # as the server puts them together
        self.branches: dict[str, str] = {}
        self.ended: list[str] = []
        self.flushes = 0
        self.breaks = False  # whether the next stream of forks breaks off after the first choice

    def backend(self) -> shoal.ShoalServer:
        return shoal.ShoalServer("http://server/v1", transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        refusal = self.broken(request)
        if refusal is not None:
            return refusal
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny", "max_model_len": 99}]})
        if path == "/flush_cache":
            self.flushes += 1
            return httpx.Response(200, json={"replicas": 1, "tokens_in_use": 0})
        if path == "/version":
            return httpx.Response(200, json={"version": "1"})
        if request.method == "DELETE":
            self.ended.append(path.rpartition("/")[2])
            return httpx.Response(204)
        body = json.loads(request.content)
        if path == "/tokenize":
            return httpx.Response(200, json={"tokens": self._tokens(body)})
        if path == "/detokenize":
            return httpx.Response(200, json={"prompt": "".join(map(chr, body["tokens"]))})
        self.bodies.append(body)
        return self._generated(body, path)

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        if "messages" not in body:
            return ([1] if body.get("add_special_tokens", True) else []) + [ord(c) for c in body["prompt"]]
        text = "\x01" + "".join(f"[{m['role']}]{m['content']}[end]" for m in body["messages"])
        return [ord(c) for c in text + ("[assistant]" if body["add_generation_prompt"] else "")]

    def _generated(self, body: dict[str, Any], path: str) -> httpx.Response:
        program = body.get("program", {})
        held = ""
        if program.get("continues"):
            name = program.get("parent") or program["branch"]
            assert name is not None
            if len(self.branches.get(name, "")) != program["held"]:
                error = {"message": "not known", "code": "program_unknown"}
                return httpx.Response(409, json={"error": error})
            held = self.branches[name]
        prompt = held + body["prompt"]
        if forks := program.get("forks"):
            return self._forked(prompt, forks)
        if template := program.get("template"):
            return self._templated(prompt, program["branch"], template)
        self.prompts.append(prompt)
        if path == "/v1/choices":
            choices = [
                {"tokens": [1], "logprobs": [-float(len(c))], "unconditional_logprobs": [0.0]} for c in body["choices"]
            ]
            return httpx.Response(200, json={"choices": choices, "usage": USAGE})
        text = f"<{len(prompt)}>"
        if program:
            self.branches[program["branch"]] = prompt + text
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
        if body.get("stream"):
            events = [{"id": "c", "choices": [{**choice, "text": c, "finish_reason": None}]} for c in text[:-1]] + [
                {"id": "c", "choices": [{**choice, "text": text[-1]}]},
                {"id": "c", "choices": [], "usage": USAGE},
            ]
            lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            return httpx.Response(200, text=lines + "data: [DONE]\n\n")
        choices = [{**choice, "index": i} for i in range(body.get("n", 1))]
        return httpx.Response(200, json={"id": "c", "choices": choices, "usage": USAGE})

    def _forked(self, prompt: str, forks: list[dict[str, Any]]) -> httpx.Response:
        """The last of the forks ends first."""
        events = ""
        for index, fork in reversed(list(enumerate(forks))):
            whole = prompt + fork["prompt"]
            self.prompts.append(whole)
            text = f"<{len(whole)}>"
            self.branches[fork["branch"]] = whole + text
            choice = {"index": index, "text": text, "finish_reason": "length", "logprobs": None}
            events += f"data: {json.dumps({'id': 'c', 'choices': [choice], 'usage': USAGE})}\n\n"
            if self.breaks:
                self.breaks = False
                return httpx.Response(200, text=events)
        return httpx.Response(200, text=events + "data: [DONE]\n\n")

    def _templated(self, prompt: str, branch: str, template: list[dict[str, Any]]) -> httpx.Response:
        events = ""
        for index, between in enumerate(["", *(call["prompt"] for call in template)]):
            prompt += between
            self.prompts.append(prompt)
            text = f"<{len(prompt)}>"
            self.branches[branch] = prompt = prompt + text
            choice = {"index": index, "text": text, "finish_reason": "length", "logprobs": None}
            events += f"data: {json.dumps({'id': 'c', 'choices': [choice], 'usage': USAGE})}\n\n"
            if self.breaks:
                self.breaks = False
                return httpx.Response(200, text=events)
        return httpx.Response(200, text=events + "data: [DONE]\n\n")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.0)
    monkeypatch.setattr(patience, "RETRY_MAX_S", 0.0)


@shoal.function
def turns(s: Any) -> None:
    s += "Hello " + shoal.gen("x") + " then "
    s += shoal.gen("y", max_tokens=3, regex="a+") + "."


def test_only_new_text_travels() -> None:
    server = FakeServer()
    state = turns.run(backend=server.backend(), stream=True)
    assert state.text() == "Hello <6> then <15>."
    assert [body["prompt"] for body in server.bodies] == ["Hello ", " then "]
    assert server.prompts == ["Hello ", "Hello <6> then "]
    first, second = (body["program"] for body in server.bodies)
    assert (first["continues"], first["then"], first["remaining"]) == (False, " then ", 1)
    assert (second["continues"], second["branch"]) == (True, first["branch"]) and second["id"] == first["id"]
    assert server.bodies[1]["max_tokens"] == 3 and server.bodies[1]["structured_outputs"] == {"regex": "a+"}
    assert state.get_meta_info("x")["cached_tokens"] == 4


def test_calls_that_are_known_to_follow_are_one_request() -> None:
    server = FakeServer()
    backend = server.backend()
    state = turns.run(backend=backend)
    assert state.text() == "Hello <6> then <15>."
    (body,) = server.bodies
    program = body["program"]
    assert (body["prompt"], program["then"], program["remaining"]) == ("Hello ", ".", 1)
    (call,) = program["template"]
    expected = {"prompt": " then ", "max_tokens": 3, "structured_outputs": {"regex": "a+"}}
    assert {name: call[name] for name in expected} == expected and "model" not in call
    assert state.get_meta_info("y")["cached_tokens"] == 4 and backend.token_usage.calls == 2


def test_calls_without_an_answer_of_their_template_are_made_by_themselves() -> None:
    server = FakeServer()
    server.breaks = True
    assert turns.run(backend=server.backend()).text() == "Hello <6> then <15>."
    assert [body["prompt"] for body in server.bodies] == ["Hello ", " then "]
    assert server.bodies[1]["program"]["held"] == len("Hello <6>")


def test_what_is_wrong_with_a_later_call_is_said_of_that_call() -> None:
    def refused(request: httpx.Request) -> httpx.Response | None:
        return httpx.Response(400, json={"error": {"message": "no such regex"}}) if b"a+" in request.content else None

    server = FakeServer(refused)
    state = turns.bind().run(backend=server.backend(), stream=True)
    with pytest.raises(shoal.ProgramError, match="no such regex"):
        state["y"]
    with pytest.raises(shoal.ProgramError, match=r"test_shoal_server.py:\d+.*no such regex"):
        turns.run(backend=server.backend())
    assert [body["prompt"] for body in server.bodies] == ["Hello "] * 2  # the first call of each run has its answer


def test_a_template_ends_where_a_value_or_a_fork_decides() -> None:
    @shoal.function
    def program(s: Any) -> None:
        s += "a" + shoal.gen("x") + "b" + shoal.select("y", ["c", "d"]) + "e" + shoal.gen("z")
        s += "f" + shoal.gen("u")
        s += s["u"] + shoal.gen("v") + shoal.gen("w", stop_regex=">")

    server = FakeServer()
    state = program.run(backend=server.backend())
    assert state.text() == "a<1>bce<7>f<11><11><19><23"
    templates = [len(body.get("program", {}).get("template", ())) for body in server.bodies]
    assert templates == [0, 0, 1, 0, 0]


def test_a_program_that_is_ended_ends_its_template() -> None:
    """A call of another text than was announced is made by itself, and what runs for the announced one ends."""

    async def run() -> None:
        ended = asyncio.Event()

        async def answers(
            call: Call, body: Any, following: Any, then: str
        ) -> AsyncGenerator[tuple[int, Generated], None]:
            try:
                yield 0, Generated(["<1>"], [{}], held=True)
                await asyncio.Event().wait()
            finally:
                ended.set()

        runs = TemplateRuns(answers)
        first = Call("p", "0", None, 0, "a", [], None, "", False, GenParams(), template=("b", GenParams()))
        answer = await runs.begin(first, {})
        assert answer is not None and answer.texts == ["<1>"]
        assert await runs.next_answer(replace(first, text="a<1>c", held=4)) is None
        await asyncio.wait_for(ended.wait(), WAIT_S)

        ended.clear()
        await runs.begin(first, {})
        runs.end_program("p")
        await asyncio.wait_for(ended.wait(), WAIT_S)
        assert await runs.next_answer(replace(first, text="a<1>b", held=4)) is None

        ended.clear()
        await runs.begin(first, {})
        waiting = asyncio.create_task(runs.next_answer(replace(first, text="a<1>b", held=4)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait_for(ended.wait(), WAIT_S)

    asyncio.run(run())


def test_forks_continue_what_their_parent_held_then() -> None:
    @shoal.function
    def program(s: Any) -> None:
        s += "a" + shoal.gen("x")
        forks = s.fork(2)
        s += "parent" + shoal.gen("y")
        forks += lambda i: f"{i}" + shoal.gen("z")
        forks.join()
        s += "end" + shoal.gen("last")

    server = FakeServer()
    state = program.run(backend=server.backend())
    assert sorted(server.prompts[1:4]) == ["a<1>0", "a<1>1", "a<1>parent"]
    assert server.prompts[4] == "a<1>parent<10>end"
    assert all(len(body["prompt"]) < 8 for body in server.bodies)  # only what is new
    assert len(server.bodies) == 3  # the forks, and the branch that goes on, are one request
    assert state.text() == "a<1>parent<10>end<17>"


@shoal.function
def judged(s: Any, essay: str, forgets: Callable[[], None] = lambda: None, given: bool = False) -> None:
    s += essay
    if given:
        s += shoal.gen("before")
        s["before"]
        forgets()
    forks = s.fork(3)
    forks += lambda i: f"part {i}:" + shoal.gen("judgement") + "; "
    forks += shoal.gen("why")
    forks.join()


@pytest.mark.parametrize("broken", [False, True])
def test_forks_of_a_text_that_no_call_has_sent_are_one_request(broken: bool) -> None:
    server = FakeServer()
    server.breaks = broken
    state = judged.run("An essay. ", backend=server.backend())
    assert state["judgement"] == ["<17>"] * 3 and state["why"] == ["<23>"] * 3
    forks = [{"prompt": f"{i}:", "then": "; ", "remaining": 1} for i in range(3)]
    sent = [{name: fork[name] for name in forks[0]} for fork in server.bodies[0]["program"]["forks"]]
    assert sent == forks and server.bodies[0]["prompt"] == "An essay. part "
    alone = [body["prompt"] for body in server.bodies[1:]]
    again = ["An essay. part 0:", "An essay. part 1:"] if broken else []  # with what follows them
    assert sorted(alone) == sorted([*again, *["; "] * (3 - len(again))])


def test_forks_of_a_branch_that_the_server_forgot_are_sent_whole() -> None:
    server = FakeServer()
    backend = server.backend()
    state = judged.run("An essay. ", forgets=server.branches.clear, given=True, backend=backend)
    assert state["judgement"] == ["<21>"] * 3
    assert [body["program"]["continues"] for body in server.bodies[1:3]] == [True, False]
    assert [body["prompt"] for body in server.bodies[1:3]] == ["part ", "An essay. <10>part "]
    assert backend.token_usage.calls == 7


def test_forks_with_other_parameters_or_other_texts_are_requests_of_their_own() -> None:
    @shoal.function
    def program(s: Any) -> None:
        forks = s.fork(3)
        forks[0] += "the same text " + shoal.gen("x")
        forks[1] += "the same text " + shoal.gen("x", max_tokens=3)
        forks[2] += "another one" + shoal.gen("x")
        forks.join()

    server = FakeServer()
    assert program.run(backend=server.backend())["x"] == ["<14>", "<14>", "<11>"]
    assert len(server.bodies) == 3 and not any("forks" in body["program"] for body in server.bodies)


def test_a_refusal_of_forks_is_each_one_s() -> None:
    def refuse(request: httpx.Request) -> httpx.Response | None:
        if b"forks" in request.content:
            return httpx.Response(400, json={"error": {"message": "the text is too long"}})
        return None

    with pytest.raises(shoal.ProgramError, match="too long"):
        judged.run("An essay. ", backend=FakeServer(refuse).backend())


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_forgot_is_told_the_whole_text(stream: bool) -> None:
    server = FakeServer()

    @shoal.function
    def program(s: Any) -> None:
        s += "a" + shoal.gen("x")
        s["x"]
        server.branches.clear()
        s += "b" + shoal.gen("y")

    state = program.run(backend=server.backend(), stream=stream)
    assert state.text() == "a<1>b<5>" and server.prompts == ["a", "a<1>b"]
    assert [body["program"]["continues"] for body in server.bodies] == [False, True, False]


def test_an_answer_that_was_cut_here_is_not_continued() -> None:
    """The server holds all of its answer, of which the program keeps what is before `stop_regex`."""

    @shoal.function
    def program(s: Any) -> None:
        s += "a" + shoal.gen("x")
        s += "b" + shoal.gen("y", stop_regex="5")
        s += "c" + shoal.gen("z")

    server = FakeServer()
    state = program.run(backend=server.backend())
    assert state.text() == "a<1>b<c<7>"
    assert server.prompts == ["a", "a<1>b", "a<1>b<c"]
    assert [body["program"].get("held") for body in server.bodies] == [None, 4, 4, None]


def test_after_a_choice_a_branch_goes_on_from_what_it_held() -> None:
    server = FakeServer()
    shoal.function(
        lambda s: s.append("a" + shoal.gen("x") + "b" + shoal.select("c", ["yes", "n"]) + "d" + shoal.gen("y"))
    ).run(backend=server.backend())
    assert [body["prompt"] for body in server.bodies] == ["a", "b", "bnd"]
    assert server.prompts == ["a", "a<1>b", "a<1>bnd"]


def test_roles_are_the_servers_own() -> None:
    @shoal.function
    def program(s: Any) -> None:
        s += shoal.system("S") + shoal.user("U") + shoal.assistant(shoal.gen("a"))

    server = FakeServer()
    program.run(backend=server.backend())
    assert server.prompts == ["[system]S[end][user]U[end][assistant]"]
    assert server.bodies[0]["stop"] == ["[end]"]


def test_choices_and_several_outputs() -> None:
    server = FakeServer()
    state = shoal.function(
        lambda s: s.append("a" + shoal.select("c", ["long", "b"]) + shoal.gen("n", n=2) + shoal.gen("last"))
    ).run(backend=server.backend())
    assert state["c"] == "b" and len(state["n"]) == 2
    assert "program" not in server.bodies[1] and server.prompts[1:] == ["ab", "ab<2>"]


@pytest.mark.parametrize("failures", [[429, 503], ["lost"]])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_were_refused_are_made_again(failures: list[Any], stream: bool) -> None:
    left = list(failures)

    def broken(request: httpx.Request) -> httpx.Response | None:
        if request.url.path != "/v1/completions" or not left:
            return None
        failure = left.pop(0)
        if failure == "lost":
            raise httpx.ConnectError("no route")
        return httpx.Response(failure, json={"error": {"message": "full"}}, headers={"Retry-After": "0"})

    state = turns.run(backend=FakeServer(broken).backend(), stream=stream)
    assert state.text() == "Hello <6> then <15>." and not left


def test_a_stream_may_have_any_character() -> None:
    server = FakeServer()
    event = {"id": "c", "choices": [{"index": 0, "text": "a\u2028b\x85c", "finish_reason": "stop", "logprobs": None}]}
    body = "data: " + json.dumps(event, ensure_ascii=False) + "\n\ndata: [DONE]\n\n"
    server.broken = lambda request: httpx.Response(200, text=body) if b'"stream"' in request.content else None
    state = shoal.function(lambda s: s.append(shoal.gen("x"))).run(backend=server.backend(), stream=True)
    assert "".join(state.text_iter("x")) == "a\u2028b\x85c"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_servers_words(stream: bool) -> None:
    def broken(request: httpx.Request) -> httpx.Response | None:
        error = {"error": {"message": "'max_tokens' is too large", "code": "invalid_value"}}
        return httpx.Response(400, json=error) if request.url.path == "/v1/completions" else None

    with pytest.raises(
        shoal.ProgramError, match=r"in turns: BackendError: http://server .*'max_tokens' is too large"
    ) as raised:
        turns.run(backend=FakeServer(broken).backend(), stream=stream).text()
    assert isinstance(raised.value.__cause__, shoal.BackendError)
    assert (raised.value.__cause__.status, raised.value.__cause__.code) == (400, "invalid_value")


def test_a_server_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "DOWN_S", 0.0)

    def broken(request: httpx.Request) -> None:
        raise httpx.ConnectError("no route")

    with pytest.raises(shoal.ProgramError, match=r"http://server .*no route"):
        turns.run(backend=FakeServer(broken).backend())


def test_a_batch_asks_for_the_models_name_once() -> None:
    server = FakeServer()
    paths: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        await asyncio.sleep(0)  # the other programs ask meanwhile
        return server.answer(request)

    turns.run_batch([{}] * 5, backend=shoal.ShoalServer("http://server", transport=httpx.MockTransport(answer)))
    assert paths.count("/v1/models") == 1


def test_a_program_is_ended_at_the_server() -> None:
    server = FakeServer()

    async def main() -> None:
        backend = server.backend()
        await turns.run_async(backend=backend)
        await backend.close()

    asyncio.run(main())
    assert server.ended == [server.bodies[0]["program"]["id"]]


def test_what_is_counted_and_said() -> None:
    server = FakeServer()
    backend = server.backend()
    turns.run(backend=backend)
    assert (backend.token_usage.prompt_tokens, backend.token_usage.calls) == (10, 2)
    assert shoal.get_server_info(backend)["id"] == "tiny"
    assert shoal.flush_cache(backend) is True and server.flushes == 1
    assert backend.get_model_name() == "tiny"
    backend.shutdown()
    assert backend.get_model_name() == "tiny"
