"""A chat keeps what was said, shows it, and survives what goes wrong."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal import chat, chat_terminal
from shoal.chat import piped
from shoal.chat_conversation import INTERRUPTED, ChatConversation, transcript
from shoal.chat_terminal import ChatTerminal, Progress, figures
from shoal.chat_tools import DENIED, Toolbox, described
from shoal.client import ChatAnswer, Client, ServerError, Streamed, StreamedCall, ThoughtPiece

Fake = Any  # of conftest.py
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def talk(fake: Fake) -> Iterator[ChatConversation]:
    with Client(fake.url + "/v1/") as client:
        yield ChatConversation(client, "fake", None, {"temperature": 0.0})


def drain(pieces: Iterable[Streamed]) -> None:
    for _ in pieces:
        pass


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


def called(name: str, arguments: str, number: int = 1) -> list[dict[str, Any]]:
    """The deltas of an answer that is a call, with its arguments in two parts."""
    half = len(arguments) // 2
    function = {"name": name, "arguments": ""}
    return [
        {"tool_calls": [{"index": 0, "id": f"call_{number}", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": arguments[:half]}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": arguments[half:]}}]},
    ]


def said(text: str) -> list[dict[str, Any]]:
    return [{"content": word} for word in text.partition(" ")]


def thought(text: str) -> list[dict[str, Any]]:
    """The deltas of thinking, as Shoal sends them."""
    return [{"reasoning_content": word, "reasoning": word} for word in text.partition(" ")]


# ---------------------------------------------------------------- the conversation


def test_turns_follow_one_another(fake: Fake, talk: ChatConversation) -> None:
    answer = talk.ask("hello there", drain)
    assert (answer.text, answer.finish_reason) == ("You said: hello there", "stop")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 4, 4)
    talk.ask("again", drain)
    assert [message["content"] for message in fake.bodies[1]["messages"]] == ["hello there", answer.text, "again"]
    assert fake.bodies[0]["temperature"] == 0.0 and "top_p" not in fake.bodies[0]


def test_every_character_may_be_in_an_answer(talk: ChatConversation) -> None:
    text = "a\u2028b\x85c é 🦊 \r\n d\x1ce"
    assert talk.ask(text, drain).text == f"You said: {text}"


def test_a_reset_keeps_the_system_prompt(talk: ChatConversation) -> None:
    talk.system = "be brief"
    talk.ask("x", drain)
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("refuses", "the prompt is too long"),
        ("hangs up", "connection"),
        ("error", "out of luck"),
        ("no end", "answer off"),
    ],
)
def test_a_question_without_an_answer_leaves_no_trace(
    fake: Fake, talk: ChatConversation, fault: str, says: str
) -> None:
    fake.fault = fault
    with pytest.raises(ServerError, match=says):
        talk.ask("x", drain)
    assert talk.messages == []
    fake.fault = None
    assert talk.ask("y", drain).text == "You said: y"


def test_an_answer_that_is_stopped_counts_as_far_as_it_came(talk: ChatConversation) -> None:
    def stop_after_two(pieces: Iterable[Streamed]) -> None:
        for n, _ in enumerate(pieces):
            if n == 1:
                raise KeyboardInterrupt

    answer = talk.ask("one two three", stop_after_two)
    assert answer.finish_reason == "stopped" and answer.text == "You said:"
    assert [message["content"] for message in talk.messages] == ["one two three", "You said:"]

    def stop_at_once(pieces: Iterable[Streamed]) -> None:
        raise KeyboardInterrupt

    assert talk.ask("never", stop_at_once).text == "" and len(talk.messages) == 2


# ---------------------------------------------------------------- thinking, and calls of tools


def test_an_answer_streams_as_text_thinking_and_calls(fake: Fake, talk: ChatConversation) -> None:
    fake.answers = [thought("I wonder") + said("Let me see") + called("add", '{"a": 1, "b": 2}')]
    two = {"index": 1, "id": "call_2", "function": {"name": "f", "arguments": "{}"}}
    fake.answers[0].append({"tool_calls": [two]})
    answer = ChatAnswer()
    pieces = list(talk.client.chat("fake", [], answer))
    assert "".join(piece.text for piece in pieces if isinstance(piece, ThoughtPiece)) == answer.thinking == "I wonder"
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == answer.text == "Let me see"
    assert answer.calls == [StreamedCall("call_1", "add", '{"a": 1, "b": 2}'), StreamedCall("call_2", "f", "{}")]
    assert answer.finish_reason == "tool_calls" and answer.pieces == len(pieces) == 10


@pytest.mark.parametrize("index", [{}, {"index": 0}])
def test_calls_of_servers_that_send_them_whole(fake: Fake, talk: ChatConversation, index: dict[str, int]) -> None:
    names = ("f", "g")
    fake.answers = [
        [{"tool_calls": [{**index, "id": f"c{name}", "function": {"name": name, "arguments": "{}"}}]} for name in names]
    ]
    answer = ChatAnswer()
    drain(talk.client.chat("fake", [], answer))
    assert answer.calls == [StreamedCall("cf", "f", "{}"), StreamedCall("cg", "g", "{}")]


def test_a_call_its_result_and_the_answer_to_it(fake: Fake, talk: ChatConversation) -> None:
    talk.tools = Toolbox([described(add, "add")])
    fake.answers = [
        [{"reasoning": "sum?"}, *called("add", '{"a": 1, "b": 2}')],
        [{"reasoning": "3!"}, *said("It is 3")],
    ]
    answer = talk.ask("1 + 2?", drain, lambda call: talk.tools.answer(call, lambda call: True))
    assert answer.text == "It is 3" and talk.thinking == "sum?\n\n3!"
    function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    turn = [
        {"role": "user", "content": "1 + 2?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "sum?",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    assert fake.bodies[1]["messages"] == turn
    assert [tool["function"]["name"] for tool in fake.bodies[0]["tools"]] == ["add"]
    talk.ask("and now?", drain)
    assert [message for message in fake.bodies[2]["messages"] if "reasoning" in message] == []  # that of an old turn


def test_a_model_that_calls_forever_is_stopped(fake: Fake, talk: ChatConversation) -> None:
    talk.tools = Toolbox([described(add, "add")])
    fake.answers = [called("add", "{}", number) for number in range(20)]
    assert talk.ask("go", drain).finish_reason == "rounds"
    assert len(fake.bodies) == 16 and talk.messages[-1]["content"] == DENIED


def test_a_stopped_call_leaves_no_call_without_a_result(fake: Fake, talk: ChatConversation) -> None:
    fake.answers = [called("add", "{}") + called("add", "{}", number=2)]
    asked: list[str] = []

    def stop(call: StreamedCall) -> str:
        asked.append(call.id)
        raise KeyboardInterrupt

    assert talk.ask("go", drain, stop).finish_reason == "stopped" and asked == ["call_1"]
    results = [(message["tool_call_id"], message["content"]) for message in talk.messages[2:]]
    assert results == [(f"call_{number}", INTERRUPTED) for number in (1, 2)]

    def stop_at_call(pieces: Iterable[Streamed]) -> None:
        for piece in pieces:
            if isinstance(piece, StreamedCall):
                raise KeyboardInterrupt

    fake.answers = [said("I will") + called("add", "{}")]
    assert talk.ask("again", stop_at_call).finish_reason == "stopped"
    assert talk.messages[-1] == {"role": "assistant", "content": "I will"}


def test_a_failure_after_a_call_leaves_no_trace(fake: Fake, talk: ChatConversation) -> None:
    def fail(call: StreamedCall) -> str:
        fake.fault = "refuses"
        return "1"

    fake.answers = [called("add", "{}")]
    with pytest.raises(ServerError):
        talk.ask("go", drain, fail)
    assert talk.messages == []


def test_a_question_is_asked_again(fake: Fake, talk: ChatConversation) -> None:
    talk.parameters["seed"] = 5
    talk.ask("one", drain)
    fake.answers = [called("add", "{}"), said("first")]
    talk.ask("two", drain)
    assert talk.retry(drain).text == "You said: two"
    assert [message["content"] for message in talk.messages] == ["one", "You said: one", "two", "You said: two"]
    assert [body["seed"] for body in fake.bodies] == [5, 5, 5, 6]
    kept = talk.messages
    fake.fault = "refuses"
    with pytest.raises(ServerError):
        talk.ask("three", drain, again=True)
    assert talk.messages == kept
    fake.fault = None
    talk.retry(drain)
    assert [message["content"] for message in talk.messages] == ["one", "You said: one", "three", "You said: three"]
    assert talk.undo() and talk.question == "one" and len(talk.messages) == 2
    assert talk.undo() and not talk.undo() and talk.messages == []


# ---------------------------------------------------------------- from a pipe


def test_a_pipe_is_a_prompt_a_line_and_answers_alone(fake: Fake, talk: ChatConversation) -> None:
    out: list[str] = []
    assert piped(talk, ["a b\n", "\n", "c\n"], out.append) == 0
    assert "".join(out) == "You said: a b\nYou said: c\n"
    assert len(fake.bodies[1]["messages"]) == 3


def test_a_pipe_ends_at_the_first_failure(fake: Fake, talk: ChatConversation, capsys: Captured) -> None:
    fake.fault = "refuses"
    assert piped(talk, ["a\n", "b\n"], lambda text: None) == 1
    assert "shoal chat: the prompt is too long" in capsys.readouterr().err and len(fake.bodies) == 1


def test_a_pipe_shows_neither_thinking_nor_calls(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    (tmp_path / "tool_of_test.py").write_text("def loud(n: int) -> int:\n    print('loud')\n    return n + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    line = ["--url", fake.url, "--reasoning-effort", "low", "--tool", "tool_of_test:loud"]
    for more, result, named in [(["--allow-tools"], "2", ["loud\n"]), ([], DENIED, ["loud(n=1)", "--allow-tools"])]:
        fake.answers = [thought("so so") + said("Let me see") + called("loud", '{"n": 1}'), said("Done it is")]
        monkeypatch.setattr("sys.stdin", io.StringIO("hi\nyou\n"))
        assert chat.main([*line, *more]) == 0
        shown = capsys.readouterr()
        assert shown.out == "Let me see\nDone it is\nYou said: you\n"
        assert all(part in shown.err for part in named) and len(shown.err.splitlines()) == 1
        assert fake.bodies[-2]["messages"][-1]["content"] == result
    assert fake.bodies[0]["reasoning_effort"] == "low"


def test_a_tool_that_is_not_there_is_said_at_once(
    fake: Fake, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    assert chat.main(["--url", fake.url, "--tool", "math:nothing"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shoal chat: --tool math:nothing: ") and len(said.splitlines()) == 1


def test_the_command_from_a_pipe(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    fake.api_key = "sesame"
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    line = ["--url", fake.url, "--model", "other", "--system", "s", "--seed", "5", "--max-tokens", "9"]
    assert chat.main([*line, "--api-key", "sesame"]) == 0
    assert capsys.readouterr().out == "You said: hi\n"
    (body,) = fake.bodies
    assert (body["model"], body["seed"], body["max_tokens"], body["temperature"]) == ("other", 5, 9, 0.6)
    assert body["messages"][0] == {"role": "system", "content": "s"}
    assert chat.main(["--url", fake.url]) == 1
    assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        (["--model", "fake"], 0.6),
        (["--model", "own"], None),
        (["--model", "own", "--temperature", "0"], 0),
    ],
)
def test_a_temperature_is_sent_where_the_model_has_none(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, line: list[str], sent: float | None
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert chat.main(["--url", fake.url, *line]) == 0
    assert fake.bodies[0].get("temperature") == sent


def test_a_model_that_is_not_there_is_said_at_once(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert chat.main(["--url", fake.url, "--model", "nope"]) == 1
    said = capsys.readouterr().err
    assert all(part in said for part in (fake.url, "'nope'", "fake, other, own")) and len(said.splitlines()) == 1
    assert fake.bodies == []


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_bytes_that_are_no_text_end_no_chat(fake: Fake, encoding: str) -> None:
    """Nor do characters that the terminal does not have."""
    command = [sys.executable, "-m", "shoal.cli", "chat", "--url", fake.url, "--system", b"caf\xe9"]
    told, environment = b"\xff\xfe hi\n \xc3\xa9 \n", os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, input=told, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.count(b"You said: ")) == (0, b"", 2)
    assert fake.bodies[0]["messages"][0]["content"] == "caf?"
    assert fake.bodies[0]["messages"][-1]["content"].endswith(" hi")


def test_no_server_is_one_line(capsys: Captured) -> None:
    assert chat.main(["--url", "127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("shoal chat: ") and len(said.splitlines()) == 1
    assert all(part in said for part in ("http://127.0.0.1:1", "`shoal serve`", "--url"))


# ---------------------------------------------------------------- in a terminal


@pytest.fixture
def terminal(talk: ChatConversation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Types lines into a chat until they are over; returns what was shown."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(*lines: str | type[BaseException]) -> str:
        left = list(lines)

        def read(prompt: str) -> str:
            line = left.pop(0) if left else EOFError
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        out = io.StringIO()
        screen = ChatTerminal(talk)
        screen.console = Console(file=out, width=100, highlight=False)
        screen.run()
        return out.getvalue()

    return run


def test_an_answer_with_its_figures(terminal: Callable[..., str]) -> None:
    shown = terminal("hello there")
    assert "You said: hello there" in shown and "4 tokens · prompt 9, 4 cached" in shown


def test_commands(fake: Fake, talk: ChatConversation, terminal: Callable[..., str], tmp_path: Path) -> None:
    saved = tmp_path / "chat.md"
    shown = terminal(
        "/help", "/system be brief", "hi", "/stats", "hi again", f"/save {saved}", "/system", "/odd", "/quit"
    )
    assert all(command in shown for command in ("/reset", "/save FILE", "/stats"))
    assert fake.bodies[0]["messages"][0] == {"role": "system", "content": "be brief"}
    assert saved.read_text().startswith("## system\n\nbe brief\n\n## user\n\nhi\n")
    assert shown.count("4 cached") == 1 and "no command /odd" in shown
    terminal("/system -", "/reset")
    assert talk.messages == [] and talk.system is None


def test_thinking_is_folded(fake: Fake, terminal: Callable[..., str]) -> None:
    fake.answers = [thought("hmm, well") + said("Yes, it is.")]
    shown = terminal("/think", "is it?", "/think", "thanks", "/think")
    assert re.search(r"\d\.\d s, 2 words; /think .*\n\nYes, it is\.", shown)
    assert shown.count("hmm, well") == 1 and shown.count("did not think") == 2


def test_thinking_grows_in_one_line() -> None:
    def line(text: str, width: int) -> str:
        out = io.StringIO()
        Console(file=out, width=width).print(Progress("thinking …", text))
        return out.getvalue()

    assert line("one two", 40) == "thinking … 2 words · one two\n"
    assert line("one\ntwo \x1b[3 three four", 32) == "thinking … 5 words · three four\n"
    assert len(line("狐" * 90, 40).splitlines()) == 1 and len(line("word " * 50, 12)) == 13


def test_a_call_runs_when_the_user_says_so(fake: Fake, talk: ChatConversation, terminal: Callable[..., str]) -> None:
    def fail() -> None:
        raise ValueError("no luck")

    talk.tools = Toolbox([described(add, "add"), described(fail, "fail")])
    calls = ["add", "add", "fail", "fail", "gone"]
    fake.answers = [
        answer
        for number, name in enumerate(calls)
        for answer in (called(name, '{"a": 1, "b": 2}' if name == "add" else "{}", number), said("done so"))
    ]
    shown = terminal("one", "what?", "n", "two", "always", "three", "y", "four", EOFError, "five", "/tools")
    results = [message["content"] for message in talk.messages if message["role"] == "tool"]
    *ran, there = results
    assert ran == [DENIED, "3", "error: ValueError: no luck", DENIED]
    assert there.startswith("error: ") and "'gone'" in there and there.endswith(": add, fail")
    assert shown.count("add(a=1, b=2)\n") == 2 and there in shown and shown.count("done so") == 5
    assert "add(a, b) runs without asking · The sum." in shown and "fail() asks" in shown


def test_an_allowed_tool_asks_no_more(fake: Fake, talk: ChatConversation, terminal: Callable[..., str]) -> None:
    talk.tools = Toolbox([described(lambda: "\n".join("abcdefghi"), "letters")], allow_all=True)
    fake.answers = [called("letters", "{}"), said("All of them.")]
    shown = terminal("go")
    assert "f\n… 3 more lines\n" in shown and "All of them." in shown and talk.messages[2]["content"].endswith("h\ni")


def test_ctrl_c_at_a_call_comes_back_to_the_prompt(
    fake: Fake, talk: ChatConversation, terminal: Callable[..., str]
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    talk.tools = Toolbox([described(stop, "stop")])
    fake.answers = [called("stop", "{}"), called("stop", "{}")]
    shown = terminal("one", KeyboardInterrupt, "two", "y", "three")
    assert shown.count("stopped") == 2 and "You said: three" in shown
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool"] * 2 + ["user", "assistant"]


def test_an_endless_turn_is_told(fake: Fake, terminal: Callable[..., str]) -> None:
    fake.answers = [called("gone", "{}") for _ in range(16)]
    assert "16 rounds" in terminal("go")


def test_the_last_question_is_retried_edited_and_forgotten(
    fake: Fake, talk: ChatConversation, terminal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[str] = []

    def typed(prompt: str, text: str = "") -> str:
        before.append(text)
        return input(prompt)

    monkeypatch.setattr(chat_terminal, "typed", typed)
    shown = terminal("/retry", "/edit", "/undo", "one", "two\\", "lines", "/retry", "/edit", "three\\", "four")
    assert shown.count("no question") == 3
    assert [text for text in before if text] == ["two\\", "lines"]
    questions = [message["content"] for message in talk.messages if message["role"] == "user"]
    assert questions == ["one", "three\nfour"] and len(fake.bodies) == 4
    terminal("/edit", KeyboardInterrupt, "/undo")
    assert [message["content"] for message in talk.messages] == ["one", "You said: one"]


def test_a_question_that_failed_can_be_retried(
    fake: Fake, talk: ChatConversation, terminal: Callable[..., str]
) -> None:
    fake.answers = [[], thought("only thinking")]
    shown = terminal("one", "two", "/retry")
    assert shown.count("not kept") == 2
    assert [message["content"] for message in talk.messages] == ["two", "You said: two"]


def test_a_question_is_edited_in_the_prompt(fake: Fake, in_terminal: Callable[..., Any]) -> None:
    terminal = in_terminal("chat", "--url", fake.url)
    terminal.wait_for("> \x1b[0m")
    terminal.type("helo\r")
    terminal.wait_for("You said: helo")
    terminal.wait_for("> \x1b[0m", times=2)
    terminal.type("/edit\r")
    terminal.wait_for("> \x1b[0mhelo")
    terminal.type("\x7flo\r")
    terminal.wait_for("You said: hello")
    terminal.wait_for("> \x1b[0m", times=4)
    terminal.type("\x04")
    assert terminal.end() == 0
    assert [message["content"] for message in fake.bodies[1]["messages"]] == ["hello"]


def test_lines_that_go_on(fake: Fake, terminal: Callable[..., str]) -> None:
    terminal("one\\", "two\\", "three")
    assert fake.bodies[0]["messages"][0]["content"] == "one\ntwo\nthree"


def test_ctrl_c_at_the_prompt_does_not_leave(fake: Fake, terminal: Callable[..., str]) -> None:
    assert "Ctrl-D" in terminal(KeyboardInterrupt, "hi") and len(fake.bodies) == 1


@pytest.mark.parametrize("before", ["", "wor"])
def test_who_comes_back_from_ctrl_z_sees_the_prompt_again(
    fake: Fake, in_terminal: Callable[..., Any], before: str
) -> None:
    terminal = in_terminal("chat", "--url", fake.url)
    prompt = "> \x1b[0m" + before
    terminal.type(before)
    terminal.wait_for(prompt)
    terminal.stop_and_go_on()
    terminal.wait_for(prompt, times=2)
    assert terminal.edits()
    terminal.type("ld\r")
    terminal.wait_for(f"You said: {before}ld")
    terminal.wait_for("> \x1b[0m", times=3)
    terminal.type("\x04")
    assert terminal.end() == 0 and fake.bodies[0]["messages"][0]["content"] == f"{before}ld"


def test_a_failure_does_not_leave_either(fake: Fake, terminal: Callable[..., str]) -> None:
    fake.fault = "refuses"
    assert "the prompt is too long" in terminal("hi", "hi")
    assert len(fake.bodies) == 2


def test_a_file_that_cannot_be_written(terminal: Callable[..., str], tmp_path: Path) -> None:
    shown = terminal(f"/save {tmp_path}/none/x", "/save")
    assert "not saved" in shown and "say where" in shown


# ---------------------------------------------------------------- words


def test_figures_say_only_what_is_known() -> None:
    assert figures(ChatAnswer()) == ""
    full = ChatAnswer("x", 3, "length", 10, 8, 21, first_s=0.5, last_s=2.5)
    said = "cut at the longest answer allowed · 21 tokens · prompt 10, 8 cached · 10.0 tokens/s · first after 0.50 s"
    assert figures(full) == said
    stopped = ChatAnswer("x", 3, "stopped", first_s=0.5, last_s=2.5)
    assert figures(stopped) == "stopped · about 3 tokens · first after 0.50 s"
    assert ChatAnswer(output_tokens=1, first_s=1.0, last_s=1.0).tokens_per_s is None


def test_transcripts() -> None:
    messages = [{"role": "user", "content": "hé\n"}]
    assert transcript(messages, as_json=False) == "## user\n\nhé\n"
    assert json.loads(transcript(messages, as_json=True)) == messages


def test_transcripts_have_thinking_and_calls() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "a ``` b"},
        {"role": "assistant", "content": "So."},
    ]
    thinking = "<details><summary>thinking</summary>\n\nhm\n\n</details>"
    assert transcript(messages, as_json=False) == (
        f"## assistant\n\n{thinking}\n\n```\nadd(a=1)\n```\n\n"
        "## tool add\n\n````\na ``` b\n````\n\n## assistant\n\nSo.\n"
    )
    assert json.loads(transcript(messages, as_json=True)) == messages
