"""Programs: what branches hold, whatever the cuts, forks, failures and limits."""

import json
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router import service
from router.config import RouterConfig
from router.programs import MAX_HEAD_START_S, BranchCall, BranchText, BranchUnknown, Home, Programs, Turn, kept_tokens
from router.text.output_text import OutputText
from router.text.tokenizer import Tokenizer
from worker.messages import Failure, Lease, Output, Release

TEXT = st.text("hel loé🦊\n<|im_start>", max_size=12)


def encoder(tokenizer: Tokenizer) -> Callable[[str, bool], list[int]]:
    return lambda text, begins: tokenizer.encode(text) if begins else tokenizer.encode_continuation(text)


# ---------------------------------------------------------------- the prompt of a request


@pytest.fixture(scope="session", params=["byte level", "byte fallback"])
def any_tokenizer(
    request: Any, byte_level_tokenizer: tokenizers.Tokenizer, byte_fallback_tokenizer: tokenizers.Tokenizer
) -> Tokenizer:
    return Tokenizer(byte_level_tokenizer if request.param == "byte level" else byte_fallback_tokenizer)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_constant_text_is_one_piece_however_it_is_cut(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Requests that generate nothing, forks, and the rest of a cut token all leave one piece of constant text."""
    encode = encoder(any_tokenizer)
    programs = Programs()
    ids = st.lists(st.integers(0, any_tokenizer.vocab_size - 1), max_size=3)
    expected: list[int] = []  # all before the constant text
    constant = ""
    name, parent, num_chars = "b0", None, 0
    for number in range(data.draw(st.integers(1, 5))):
        text, output_ids = data.draw(TEXT), data.draw(ids)
        rest = data.draw(TEXT) if output_ids else ""
        held = programs.look("p", name, parent, continues=number > 0, num_chars=num_chars)
        prompt = held.branch.prompt(text, encode)
        constant += text
        assert prompt == expected + (encode(constant, not expected) if constant or not expected else [])
        programs.end(programs.begin(held), held.branch.extended(text, prompt, "xy" + rest, output_ids, rest))
        num_chars += len(text) + 2 + len(rest)
        if output_ids:
            expected, constant = prompt + output_ids, rest
        parent = None
        if data.draw(st.booleans()):
            name, parent = f"b{number + 1}", name


@settings(deadline=None, max_examples=150)
@given(text=st.text(max_size=20))
def test_a_continuation_has_the_text_and_nothing_before_it(any_tokenizer: Tokenizer, text: str) -> None:
    token_ids = any_tokenizer.encode_continuation(text)
    assert any_tokenizer.special_ids.isdisjoint(token_ids) or "<" in text
    if 0 not in token_ids:  # the fallback tokenizer's <unk>
        assert b"".join(any_tokenizer.token_bytes[token_id] for token_id in token_ids) == text.encode()


def test_what_a_branch_holds_counts_as_text() -> None:
    """A call of few bytes may continue a long one: then a thread reads it."""
    held = BranchText(array("i", range(160)), "x" * 3000)
    assert held.text_bytes == 3010 and BranchText().text_bytes == 0


def test_special_tokens_only_begin_a_text() -> None:
    calls: list[tuple[str, bool]] = []

    def encode(text: str, begins: bool) -> list[int]:
        calls.append((text, begins))
        return [len(text)]

    branch = BranchText()
    assert branch.prompt("", encode) == [0]
    assert branch.prompt("abc", encode) == [3]
    branch = branch.extended("abc", [3], "yx", [7], "x")
    assert branch == BranchText(array("i", [3, 7]), "x", 5)
    assert branch.prompt("yz", encode) == [3, 7, 3]
    assert BranchText(branch.token_ids).prompt("", encode) == [3, 7]  # a generation right after another
    assert calls == [("", True), ("abc", True), ("xyz", False)]


# ---------------------------------------------------------------- the kept tokens of an output


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_kept_tokens_are_those_of_the_kept_text(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """The text of the kept tokens, with the rest, is the kept text; one more token would be too much."""
    stop = data.draw(st.lists(st.sampled_from(["e", "lo", "🦊", "é", "l\n"]), max_size=2, unique=True))
    include = data.draw(st.booleans())
    token_ids = any_tokenizer.encode_continuation(data.draw(TEXT))
    made = OutputText(any_tokenizer, stop=tuple(stop), include_stop=include, continues=True, wants_ends=True)
    text = ""
    for number, token_id in enumerate(token_ids, 1):
        last = number == len(token_ids)
        piece = made.push(Output(request_id="", token_ids=[token_id], finish_reason="length" if last else None))
        text += piece.text
        if piece.finish_reason is not None:
            break
    kept, rest = kept_tokens(made.token_ids, made.ends, text, made.is_cut)
    assert kept == token_ids[: len(kept)]

    def decoded(ids: list[int]) -> str:
        detokenizer = any_tokenizer.detokenizer(continues=True)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    assert decoded(kept) + rest == text
    if made.is_cut:
        assert not rest or not text.startswith(decoded(token_ids[: len(kept) + 1]))
    else:
        assert (kept, rest) == (token_ids, "")


@pytest.mark.parametrize(
    ("ends", "text", "is_cut", "kept"),
    [
        ([2, 4, 6], "abcdef", False, ([0, 1, 2], "")),
        ([2, 4, 6], "abcde", True, ([0, 1], "e")),
        ([2, 4, 6], "a", True, ([], "a")),
        ([2, None, 3, 4], "abc", True, ([0, 1, 2], "")),
        ([2, None, 3, 4], "ab", True, ([0], "")),  # not the first half of a character
        ([2, 2, 4], "ab", True, ([0], "")),  # no text at the cut: not known to be wanted
        ([], "", True, ([], "")),
    ],
)
def test_the_cut(ends: list[int | None], text: str, is_cut: bool, kept: tuple[list[int], str]) -> None:
    assert kept_tokens(range(len(ends)), ends, text, is_cut) == kept


# ---------------------------------------------------------------- the table

NAMES = st.sampled_from(["a", "b", "c"])
MAX_TOKENS, MAX_BRANCHES, TIMEOUT_S = 12, 4, 10


class Table(RuleBasedStateMachine):
    """Against a dict of what each branch must hold, if it is known at all."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.programs = Programs(MAX_TOKENS, MAX_BRANCHES, TIMEOUT_S, clock=lambda: self.now)
        self.holds: dict[tuple[str, str], tuple[str, float]] = {}  # and when it was last used
        self.turns: list[tuple[Turn, tuple[str, str], str]] = []

    def known(self, program: str, name: str) -> str | None:
        try:
            found = self.programs.look(program, name, None, continues=True)
        except BranchUnknown:
            return None
        text, used_s = self.holds[program, name]
        assert found.branch.tail == text
        assert self.now - used_s < TIMEOUT_S
        self.holds[program, name] = (text, self.now)
        return text

    @rule(program=NAMES, name=NAMES, continues=st.booleans(), parent=st.none() | NAMES)
    def begin(self, program: str, name: str, continues: bool, parent: str | None) -> None:
        source = name if parent is None else parent
        expected = self.known(program, source) if continues else ""
        is_there = (program, name) in self.holds and self.known(program, name) is not None
        has_turn = any(key == (program, name) for _, key, _ in self.turns)
        try:
            held = self.programs.look(program, name, parent, continues)
            turn = self.programs.begin(held)
        except BranchUnknown:
            assert continues
            assert expected is None or has_turn or (is_there and parent is not None)
            return
        assert held.branch.tail == expected
        self.holds.pop((program, name), None)
        self.turns = [entry for entry in self.turns if entry[1] != (program, name)]
        self.turns.append((turn, (program, name), held.branch.tail))

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 9), text=st.text("xyz", max_size=3))
    def end(self, which: int, text: str) -> None:
        turn, key, before = self.turns.pop(which % len(self.turns))
        self.programs.end(turn, BranchText(tail=before + text))
        self.holds[key] = (before + text, self.now)

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 9))
    def undo(self, which: int) -> None:
        turn, key, _ = self.turns.pop(which % len(self.turns))
        self.programs.undo(turn)
        if turn.previous is not None:
            self.holds[key] = (turn.previous.tail, self.now)
        else:
            assert self.known(*key) is None

    @precondition(lambda self: self.turns)
    @rule(which=st.integers(0, 9), ended=st.booleans())
    def drop(self, which: int, ended: bool) -> None:
        turn, key, _ = self.turns.pop(which % len(self.turns))
        if ended:
            self.programs.end(turn, BranchText(tail="unread"))
        self.programs.drop(turn)
        assert self.known(*key) is None

    @rule(program=NAMES)
    def remove(self, program: str) -> None:
        self.programs.remove(program)
        stale = [entry for entry in self.turns if entry[1][0] == program]
        self.turns = [entry for entry in self.turns if entry not in stale]
        self.holds = {key: value for key, value in self.holds.items() if key[0] != program}
        for turn, key, _ in stale:
            self.programs.end(turn, BranchText(tail="too late"))
            assert self.known(*key) is None

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def bounded(self) -> None:
        known = [key for key in list(self.holds) if self.known(*key) is not None]
        assert len(known) <= MAX_BRANCHES
        assert self.programs.num_tokens == sum(len(self.holds[key][0]) for key in known) <= MAX_TOKENS
        assert len(self.programs) == len({program for program, _ in known} | {key[0] for _, key, _ in self.turns})


TestTable = pytest.mark.slow(Table.TestCase)
TestTable.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)


def test_a_late_request_does_not_overwrite_the_one_that_replaced_it() -> None:
    programs = Programs()
    first = programs.begin(programs.look("p", "b", None, False))
    second = programs.begin(programs.look("p", "b", None, False))
    programs.end(first, BranchText(tail="first"))
    with pytest.raises(BranchUnknown):
        programs.look("p", "b", None, True)
    programs.end(second, BranchText(tail="second"))
    programs.drop(first)
    assert programs.look("p", "b", None, True).branch.tail == "second"


def test_what_was_looked_at_must_still_be_there() -> None:
    programs = Programs()
    programs.end(programs.begin(programs.look("p", "b", None, False)), BranchText(tail="x"))
    held = programs.look("p", "b", None, True)
    programs.end(programs.begin(held), BranchText(tail="xy"))
    with pytest.raises(BranchUnknown, match="another request"):
        programs.begin(held)
    fork = programs.look("p", "c", "b", True)
    assert fork.branch.tail == "xy"
    programs.end(programs.begin(fork), BranchText(tail="xyz"))
    with pytest.raises(BranchUnknown, match="another request"):
        programs.begin(fork)
    with pytest.raises(BranchUnknown, match="parent"):
        programs.look("p", "c", "b", True)


# ---------------------------------------------------------------- over HTTP


class Client:
    """A program at a server."""

    def __init__(self, url: str, program: str = "p", key: str | None = None) -> None:
        self.url, self.program = url, program
        self.http = httpx.Client(headers={} if key is None else {"Authorization": f"Bearer {key}"}, timeout=20)

    def post(self, prompt: Any, branch: str = "b", *, program: Any = None, **fields: Any) -> httpx.Response:
        call = {"id": self.program, "branch": branch} | (program or {})
        return self.http.post(
            f"{self.url}/v1/completions", json={"model": "tiny", "prompt": prompt, "program": call} | fields
        )

    def text(self, *args: Any, **fields: Any) -> str:
        answer = self.post(*args, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


NEXT = {"continues": True}


@pytest.fixture
def client(stack: Any) -> Iterator[Client]:
    made = Client(stack.url)
    with made.http:
        yield made


def prompts(stack: Any) -> list[list[int]]:
    return [request.prompt_ids for request in stack.fakes["r0"].requests()]


def test_a_branch_continues(client: Client, stack: Any, tokenizer: Tokenizer) -> None:
    """A stop string cuts `quick`: its token is not the branch's, the text before the stop string is."""
    assert client.text("Hello", stop="ick") == "The qu"
    assert client.text(" there", program=NEXT, max_tokens=1) == "The"
    said = tokenizer.encode("The quick")[:1]
    assert tokenizer.decode(said) == "The"
    second = tokenizer.encode("Hello") + said + tokenizer.encode(" qu there")
    assert prompts(stack)[1] == second
    assert client.text("", program=NEXT, max_tokens=2) == "The quick"
    assert prompts(stack)[2] == second + said


def test_nothing_is_generated_and_nothing_tokenised_for_good(client: Client, stack: Any, tokenizer: Tokenizer) -> None:
    client.text("Hel", max_tokens=0)
    client.text("lo the", program=NEXT, max_tokens=0)
    client.text("re", program=NEXT, max_tokens=1)
    assert prompts(stack)[-1] == tokenizer.encode("Hello there")


def test_forks(client: Client, stack: Any, tokenizer: Tokenizer) -> None:
    client.text("Hello", max_tokens=1)
    start = tokenizer.encode("Hello") + tokenizer.encode("The quick")[:1]
    for branch in ("c", "d"):
        client.text(f" {branch}", branch, program={"parent": "b", "continues": True}, max_tokens=1)
        assert prompts(stack)[-1] == start + tokenizer.encode(f" {branch}")
    client.text(" b", program=NEXT, max_tokens=1)
    assert prompts(stack)[-1] == start + tokenizer.encode(" b")


def test_one_request_begins_several_branches(client: Client, stack: Any, tokenizer: Tokenizer) -> None:
    client.text("Hello", max_tokens=1)
    start = tokenizer.encode("Hello") + tokenizer.encode("The quick")[:1]
    forks = [{"branch": name, "prompt": f" {name}", "then": " x"} for name in ("c", "d", "e")]
    call = {"id": "p", "parent": "b", "continues": True, "held": 8, "forks": forks}
    body = {"model": "tiny", "prompt": " the", "program": call, "max_tokens": 1}
    answer = client.http.post(f"{client.url}/v1/completions", json=body)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["The"] * 3, answer.text
    assert [p for p in prompts(stack) if len(p) > 6][:3] == [
        start + tokenizer.encode(f" the {name}") for name in ("c", "d", "e")
    ]
    for name in ("d", "e", "c"):
        client.text("!", name, program=NEXT | {"held": 8 + 6 + 3}, max_tokens=1)
        said = tokenizer.encode("The quick")[:1]
        assert prompts(stack)[-1] == start + tokenizer.encode(f" the {name}") + said + tokenizer.encode("!")


def test_each_fork_is_sent_as_it_ends(client: Client, stack: Any, tokenizer: Tokenizer) -> None:
    short = tokenizer.encode("The quick")[:1]
    long = short * 30
    longer = tokenizer.encode("Hello b")
    fake = stack.fakes["r0"]
    fake.script = lambda request: long if request.prompt_ids == longer else short
    fake.allow(0)  # until both have come; then one token each, which ends the short one
    forks = [{"branch": "2", "prompt": " b"}, {"branch": "1", "prompt": " a"}]
    body = {"model": "tiny", "prompt": "Hello", "program": {"id": "p", "forks": forks}, "max_tokens": 40}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True, "whole_choices": True}}
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: [fake.wait_for(lambda: len(fake.requests()) == 2), fake.allow(2)])
        with client.http.stream("POST", f"{client.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            said = [next(line for line in lines if line.startswith("data: {"))]  # the long one cannot have ended
            fake.allow(None)
            said += [line for line in lines if line.startswith("data: {")]
    events = [json.loads(line[6:]) for line in said]
    assert [[choice["index"] for choice in event["choices"]] for event in events] == [[1], [0], []], said
    sizes = [event["usage"]["completion_tokens"] for event in events]
    assert sizes[2] == sizes[0] + sizes[1] and sizes[0] < sizes[1]
    prompt_tokens = [event["usage"]["prompt_tokens"] for event in events]
    assert prompt_tokens[:2] == [len(tokenizer.encode("Hello a")), len(tokenizer.encode("Hello b"))]
    assert prompt_tokens[2] == sum(prompt_tokens[:2])


@pytest.mark.parametrize(
    ("program", "param"),
    [
        ({"branch": "b", "forks": [{"branch": "c", "prompt": ""}]}, "program.branch"),
        ({"remaining": 1, "forks": [{"branch": "c", "prompt": ""}]}, "program.remaining"),
        ({"continues": True, "forks": [{"branch": "c", "prompt": ""}]}, "program.parent"),
        ({"forks": [{"branch": "c", "prompt": "a"}, {"branch": "c", "prompt": "b"}]}, "program.forks"),
        ({}, "program.branch"),
    ],
)
def test_forks_that_make_no_sense_are_refused(client: Client, program: Any, param: str) -> None:
    body = {"model": "tiny", "prompt": "Hello", "program": {"id": "p"} | program}
    answer = client.http.post(f"{client.url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "program": {"id": "p"} | program}
    assert client.http.post(f"{client.url}/v1/chat/completions", json=chat).status_code == 400


def test_the_stop_token_is_the_branchs_only_if_it_is_the_texts(
    client: Client, stack: Any, tokenizer: Tokenizer
) -> None:
    end = tokenizer.token_id("<|im_end|>")
    client.text("Hello", max_tokens=100)
    client.text("", program=NEXT, max_tokens=100, include_stop_str_in_output=True)
    client.text("", program=NEXT, max_tokens=1)
    first, second, third = prompts(stack)
    assert end not in second and third == second + second[len(first) :] + [end]


@pytest.mark.parametrize("stream", [True, False])
def test_unknown_branches(client: Client, stack: Any, stream: bool) -> None:
    for branch, program in (("b", NEXT), ("c", {"parent": "b", "continues": True})):
        answer = client.post("x", branch, program=program, stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (409, "program_unknown", "program")
    client.text("Hello")
    assert client.http.delete(f"{stack.url}/v1/programs/other").status_code == 204
    assert client.post("x", program=NEXT, stream=stream).status_code == 200
    assert client.http.delete(f"{stack.url}/v1/programs/p").status_code == 204
    assert client.post("x", program=NEXT, stream=stream).status_code == 409
    assert stack.metric("shoal_programs{") == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"program": {"id": "p"}}, "program.branch"),
        ({"program": {"id": "", "branch": "b"}}, "program.id"),
        ({"program": {"id": "p", "branch": "x" * 65}}, "program.branch"),
        ({"program": {"id": "p", "branch": "b", "forks": 1}}, "program.forks"),
    ],
)
def test_refusals(stack: Any, fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "prompt": "a", "program": {"id": "p", "branch": "b"}} | fields
    answer = httpx.post(f"{stack.url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_chat_continues_nothing(stack: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    for program, status in (({}, 200), ({"continues": True}, 400)):
        call = {"id": "p", "branch": "b"} | program
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body | {"program": call})
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "program.continues"


def test_a_branch_that_holds_something_else_is_unknown(client: Client, stack: Any) -> None:
    """An answer that the client did not get, or has cut, is noticed before anything is computed."""
    said = client.text("Hello", stop="ick")
    assert client.text("!", program=NEXT | {"held": len("Hello" + said)}, max_tokens=1) == "The"
    answer = client.post("!", program=NEXT | {"held": len("Hello" + said)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "program_unknown")
    held = len("Hello" + said + "!The")
    fork = {"parent": "b", "continues": True}
    assert client.post("?", "c", program=fork | {"held": held + 1}).status_code == 409
    assert client.post("?", "c", program=fork | {"held": held}).status_code == 200
    client.text("?", program=NEXT | {"held": held}, max_tokens=0)
    assert client.post("", program=NEXT | {"held": held + 1}, max_tokens=1).status_code == 200


def test_a_refused_request_changes_nothing(client: Client, stack: Any, tokenizer: Tokenizer) -> None:
    client.text("Hello", max_tokens=1)
    fake = stack.fakes["r0"]
    full = Failure("overloaded", "full", retry_after_s=1.0)
    fake.fail(full)
    assert client.post(" a", program=NEXT).status_code == 429
    assert client.post(" a", "c", program={"parent": "b", "continues": True}).status_code == 429
    assert client.post(" a", program=NEXT, max_tokens=10_000).status_code == 400
    fake.reply = lambda request: None
    client.text(" b", program=NEXT, max_tokens=1)
    start = tokenizer.encode("Hello") + tokenizer.encode("The quick")[:1]
    assert prompts(stack)[-1] == start + tokenizer.encode(" b")
    client.text(" c", "c", program={"parent": "b", "continues": True}, max_tokens=1)


def test_a_stream_that_is_broken_off_leaves_no_branch(client: Client, stack: Any, make_replica: Any) -> None:
    client.text("Hello", max_tokens=1)
    fake = stack.fakes["r0"].hold()
    fake.allow(2)
    body = {"model": "tiny", "prompt": " a", "stream": True, "program": {"id": "p", "branch": "b", "continues": True}}
    connection = stack.raw("/v1/completions", body)
    stack.read_until(connection, b"The")
    assert client.post(" b", program=NEXT).status_code == 409  # one request at a time
    connection.close()
    stack.idle()
    fake.allow(None)
    assert client.post(" b", program=NEXT).status_code == 409
    assert client.text("whole", max_tokens=1) == "The"
    assert client.post(" b", program=NEXT).status_code == 200


def test_an_error_within_a_stream_leaves_no_branch(client: Client, stack: Any) -> None:
    client.text("Hello", max_tokens=1)
    fake = stack.fakes["r0"].hold()
    fake.allow(1)
    body = {"model": "tiny", "prompt": " a", "stream": True, "program": {"id": "p", "branch": "b", "continues": True}}
    connection = stack.raw("/v1/completions", body)
    stack.read_until(connection, b"The")
    name = fake.requests()[-1].request_id
    failed = Output(request_id=name, finish_reason="error", failure=Failure("internal", "broken"))
    stack.server.do(_fail(stack, failed))
    stack.read_until(connection, b"internal_error")
    connection.close()
    fake.allow(None)
    assert client.post(" b", program=NEXT).status_code == 409


async def _fail(stack: Any, output: Output) -> None:
    for link in stack.replicas._connections.values():
        link._deliver(output)


def test_a_resumed_stream_leaves_its_whole_text(make_stack: Any, make_replica: Any, tokenizer: Tokenizer) -> None:
    fakes = [make_replica().hold(), make_replica().hold()]
    stack = make_stack(*fakes)
    for fake in fakes:
        fake.allow(2)
    body = {"model": "tiny", "prompt": "Hello", "stream": True, "max_tokens": 5, "program": {"id": "p", "branch": "b"}}
    connection = stack.raw("/v1/completions", body)
    stack.read_until(connection, b"The")
    first, second = sorted(fakes, key=lambda fake: len(fake.requests()), reverse=True)
    first.wait_for(lambda: first.sent == 2)
    first.die()
    second.allow(None)
    stack.read_until(connection, b"[DONE]")
    connection.close()
    client = Client(stack.url)
    with client.http:
        client.text("", program=NEXT, max_tokens=1)
    said = tokenizer.encode("The quick brown fox — naïve café")
    assert second.requests()[-1].prompt_ids == tokenizer.encode("Hello") + said[:5]


def test_clients_with_other_keys_have_other_programs(make_stack: Any, make_replica: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    stack = make_stack(make_replica(), config=RouterConfig(api_key_file=keys))
    one, two = Client(stack.url, key="one"), Client(stack.url, key="two")
    with one.http, two.http:
        one.text("Hello", max_tokens=1)
        assert two.post("x", program=NEXT).status_code == 409
        assert two.http.delete(f"{stack.url}/v1/programs/p").status_code == 204
        assert one.post("x", program=NEXT).status_code == 200
        assert httpx.delete(f"{stack.url}/v1/programs/p").status_code == 401


# ---------------------------------------------------------------- leases, homes, and the text that follows


def test_requests_carry_the_lease_of_their_branch(client: Client, stack: Any) -> None:
    client.text("Hello", program={"lease_s": 60}, max_tokens=1)
    client.text("x", "c", program={"parent": "b", "continues": True}, max_tokens=1)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    chat["program"] = {"id": "p", "branch": "d", "lease_s": 1.5}
    assert client.http.post(f"{stack.url}/v1/chat/completions", json=chat).status_code == 200
    scored = {"model": "tiny", "prompt": "a", "choices": ["x, y", "z"], "unconditional": True}
    scored["program"] = {"id": "p", "branch": "e", "lease_s": 9}
    assert client.http.post(f"{stack.url}/v1/choices", json=scored).status_code == 200
    assert client.http.post(f"{stack.url}/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 200
    first, second, third, *scores, last = [request.lease for request in stack.fakes["r0"].requests()]
    assert [first, second, third] == [Lease("/p", "b", 60), Lease("/p", "c", 0), Lease("/p", "d", 1.5)]
    assert scores == [Lease("/p", "e", 9)] * 2 + [None]  # what is scored without the prompt is not the branch's
    assert last is None


@pytest.mark.parametrize("lease_s", [-1, 3601, "1"])
def test_refused_leases(client: Client, lease_s: Any) -> None:
    answer = client.post("a", program={"lease_s": lease_s})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "program.lease_s")


def test_the_end_of_a_program_ends_its_leases_everywhere(make_stack: Any, make_replica: Any) -> None:
    fakes = [make_replica(), make_replica()]
    stack = make_stack(*fakes)
    assert httpx.delete(f"{stack.url}/v1/programs/some/id").status_code == 204
    for fake in fakes:
        fake.wait_for(lambda fake=fake: Release(["/some/id"]) in fake.received)


def test_a_branch_goes_home(make_stack: Any, make_replica: Any) -> None:
    """The placer hears of the replica of the branch's last request, for a new branch of the parent's."""
    stack = make_stack(make_replica(), make_replica())
    homes: list[Home | None] = []
    place = stack.placer.place

    async def listen(*arguments: Any) -> str:
        homes.append(arguments[-2])
        return await place(*arguments)

    stack.placer.place = listen
    client = Client(stack.url)
    with client.http:
        client.text("Hello", max_tokens=3)
        client.text(" a", program=NEXT, max_tokens=1)
        client.text(" b", "c", program={"parent": "b", "continues": True}, max_tokens=1)
        client.text("other", "d", max_tokens=1)
    first, second, third, fourth = [
        (name, len(prompt_ids), replica) for name, prompt_ids, replica in stack.placer.placed
    ]
    assert homes == [
        None,
        Home(first[2], first[1] + 3),
        Home(second[2], second[1] + 1),
        None,
    ]
    assert third[1] > second[1] and fourth[1] < second[1]


def test_a_lost_home_costs_nothing_but_time(make_stack: Any, make_replica: Any, tokenizer: Tokenizer) -> None:
    fakes = [make_replica(), make_replica()]
    stack = make_stack(*fakes)
    client = Client(stack.url)
    with client.http:
        client.text("Hello", program={"lease_s": 60}, max_tokens=1)
        home, other = sorted(fakes, key=lambda fake: len(fake.requests()), reverse=True)
        home.die()
        stack.until(lambda: len(stack.replicas.ready) == 1)
        assert client.text(" on", program=NEXT | {"lease_s": 60}, max_tokens=1) == "The"
        client.text("", program=NEXT, max_tokens=1)
    said = tokenizer.encode("The quick")[:1]
    second, third = other.requests()
    assert second.prompt_ids == tokenizer.encode("Hello") + said + tokenizer.encode(" on")
    assert third.prompt_ids == second.prompt_ids + said


def test_the_text_that_follows_is_computed(client: Client, stack: Any, tokenizer: Tokenizer) -> None:
    then = " Next:" * 50
    client.text("Hello", program={"then": then, "lease_s": 5}, max_tokens=1)
    fake = stack.fakes["r0"]
    fake.wait_for(lambda: len(fake.requests()) == 2)
    first, second = fake.requests()
    said = tokenizer.encode("The quick")[:1]
    assert second.prompt_ids == first.prompt_ids + said + tokenizer.encode(then)
    assert (second.sampling.max_tokens, second.priority, second.lease) == (1, -(1 << 31), None)
    client.text(" Next: go", program=NEXT, max_tokens=1)  # the branch did not take it for its own
    assert prompts(stack)[2] == first.prompt_ids + said + tokenizer.encode(" Next: go")
    assert stack.metric("shoal_sequences_total") == 2


def test_the_text_that_follows_may_be_dropped(client: Client, stack: Any) -> None:
    """By a replica that is full, and where nothing can follow: nobody hears of it."""
    fake = stack.fakes["r0"]
    full = Failure("overloaded", "full", retry_after_s=1.0)
    fake.reply = lambda request: (
        Output(request_id=request.request_id, finish_reason="error", failure=full)
        if request.request_id.endswith("-then")
        else None
    )
    client.text("Hello", program={"then": " Next:" * 50}, max_tokens=1)
    fake.wait_for(lambda: len(fake.requests()) == 2)
    stack.until(lambda: not stack.service._prefetches)
    assert client.text(" Next:", program=NEXT, max_tokens=1) == "The"


def test_texts_that_follow_do_not_pile_up(
    make_stack: Any, make_replica: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the lowest priority they may wait for ever, in the queues of requests that are waited for."""
    monkeypatch.setattr(service, "MAX_PREFETCHED_TEXTS", 2)
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    fake = make_replica()
    fake.reply = lambda request: Output(request_id=request.request_id) if request.priority < 0 else None  # it waits
    stack = make_stack(fake, config=RouterConfig(api_key_file=keys))
    one, two = Client(stack.url, key="one"), Client(stack.url, key="two")

    def following() -> list[str]:
        return [request.request_id for request in fake.requests() if request.priority < 0]

    with one.http, two.http:
        for branch in "abcd":
            one.text("Hello", branch, program={"then": " Next:" * 50}, max_tokens=1)
        fake.wait_for(lambda: len(following()) == 2)
        two.text("Hello", program={"then": " Next:" * 50}, max_tokens=1)
        fake.wait_for(lambda: len(following()) == 3)
        one.http.delete(f"{stack.url}/v1/programs/other")
        one.http.delete(f"{stack.url}/v1/programs/p")  # what was computed would be of no use any more
        fake.wait_for(lambda: sorted(fake.aborted()) == sorted(following()[:2]))
        one.text("Hello", program={"id": "q", "then": " Next:" * 50}, max_tokens=1)
        fake.wait_for(lambda: len(following()) == 4)
        one.http.delete(f"{stack.url}/v1/programs/q")
        two.http.delete(f"{stack.url}/v1/programs/p")
        stack.until(lambda: not stack.service._prefetches)


def test_a_short_text_that_follows_is_left_to_the_next_request(client: Client, stack: Any) -> None:
    client.text("Hello", program={"then": "x" * 255}, max_tokens=1)
    assert not stack.service._prefetches
    client.text("Next:", program=NEXT, max_tokens=1)
    assert len(stack.fakes["r0"].requests()) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/choices"])
def test_only_completions_compute_the_text_that_follows(stack: Any, path: str) -> None:
    """It is a hint: what cannot use it takes it."""
    body = {"model": "tiny", "program": {"id": "p", "branch": "b", "then": "x" * 256}}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    scored = {"prompt": "a", "choices": ["x"]}
    assert httpx.post(f"{stack.url}{path}", json=body | (chat if "chat" in path else scored)).status_code == 200
    assert not stack.service._prefetches
    assert len(stack.fakes["r0"].requests()) == 1


# ---------------------------------------------------------------- order


@given(
    age_s=st.floats(0, 1e6),
    remaining=st.none() | st.integers(0, 1000),
    deadline_s=st.none() | st.floats(0, 1e6),
)
def test_head_starts(age_s: float, remaining: int | None, deadline_s: float | None) -> None:
    """Bounded; longer for older programs, for fewer remaining calls and for nearer deadlines; none without hints."""

    def head_start(age_s: float, remaining: int | None, deadline_s: float | None) -> float:
        return BranchCall(Lease("p", "b"), remaining=remaining, deadline_s=deadline_s).head_start_s(age_s)

    given_s = head_start(age_s, remaining, deadline_s)
    assert 0 <= given_s <= MAX_HEAD_START_S
    assert head_start(age_s + 1, remaining, deadline_s) >= given_s
    assert remaining is None or head_start(age_s, remaining + 1, deadline_s) <= given_s
    assert deadline_s is None or head_start(age_s, remaining, deadline_s + 1) <= given_s
    assert head_start(age_s, None, None) == 0


def test_head_starts_reach_the_replica(client: Client, stack: Any) -> None:
    now_s = 100.0
    stack.service.programs._clock = lambda: now_s
    client.text("a", "a", program={"remaining": 1}, max_tokens=1)
    now_s += 1.0
    client.text("a", "b", program={"remaining": 1}, max_tokens=1)
    client.text("a", "c", program={"remaining": 0, "deadline_s": 0.5}, max_tokens=1)
    client.text("a", "d", max_tokens=1)
    assert [request.head_start_s for request in stack.fakes["r0"].requests()] == [0.0, 0.5, 1.5, 0.0]
