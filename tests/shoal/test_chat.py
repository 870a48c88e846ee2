"""A chat keeps what was said, shows it, and survives what goes wrong."""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal import chat
from shoal.chat import piped
from shoal.chat_conversation import Conversation, transcript
from shoal.chat_terminal import ChatTerminal, figures
from shoal.client import Answer, Client, ServerError

Fake = Any  # of conftest.py
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def talk(fake: Fake) -> Iterator[Conversation]:
    with Client(fake.url + "/v1/") as client:
        yield Conversation(client, "fake", None, {"temperature": 0.0})


def drain(pieces: Iterable[str]) -> None:
    for _ in pieces:
        pass


# ---------------------------------------------------------------- the conversation


def test_turns_follow_one_another(fake: Fake, talk: Conversation) -> None:
    answer = talk.ask("hello there", drain)
    assert (answer.text, answer.finish_reason) == ("You said: hello there", "stop")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 4, 4)
    talk.ask("again", drain)
    assert [message["content"] for message in fake.bodies[1]["messages"]] == ["hello there", answer.text, "again"]
    assert fake.bodies[0]["temperature"] == 0.0 and "top_p" not in fake.bodies[0]


def test_every_character_may_be_in_an_answer(talk: Conversation) -> None:
    text = "a\u2028b\x85c é 🦊 \r\n d\x1ce"
    assert talk.ask(text, drain).text == f"You said: {text}"


def test_a_reset_keeps_the_system_prompt(talk: Conversation) -> None:
    talk.system = "be brief"
    talk.ask("x", drain)
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("refuses", "the prompt is too long"),
        ("hangs up", "the connection broke"),
        ("error", "out of luck"),
        ("no end", "broke the answer off"),
    ],
)
def test_a_question_without_an_answer_leaves_no_trace(fake: Fake, talk: Conversation, fault: str, says: str) -> None:
    fake.fault = fault
    with pytest.raises(ServerError, match=says):
        talk.ask("x", drain)
    assert talk.messages == []
    fake.fault = None
    assert talk.ask("y", drain).text == "You said: y"


def test_an_answer_that_is_stopped_counts_as_far_as_it_came(talk: Conversation) -> None:
    def stop_after_two(pieces: Iterable[str]) -> None:
        for n, _ in enumerate(pieces):
            if n == 1:
                raise KeyboardInterrupt

    answer = talk.ask("one two three", stop_after_two)
    assert answer.finish_reason == "stopped" and answer.text == "You said:"
    assert [message["content"] for message in talk.messages] == ["one two three", "You said:"]

    def stop_at_once(pieces: Iterable[str]) -> None:
        raise KeyboardInterrupt

    assert talk.ask("never", stop_at_once).text == "" and len(talk.messages) == 2


# ---------------------------------------------------------------- from a pipe


def test_a_pipe_is_a_prompt_a_line_and_answers_alone(fake: Fake, talk: Conversation) -> None:
    out: list[str] = []
    assert piped(talk, ["a b\n", "\n", "c\n"], out.append) == 0
    assert "".join(out) == "You said: a b\nYou said: c\n"
    assert len(fake.bodies[1]["messages"]) == 3


def test_a_pipe_ends_at_the_first_failure(fake: Fake, talk: Conversation, capsys: Captured) -> None:
    fake.fault = "refuses"
    assert piped(talk, ["a\n", "b\n"], lambda text: None) == 1
    assert "shoal chat: the prompt is too long" in capsys.readouterr().err and len(fake.bodies) == 1


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
    assert "the server wants a key" in capsys.readouterr().err


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
    assert capsys.readouterr().err == f"shoal chat: {fake.url} has no model 'nope'; it has fake, other, own\n"
    assert fake.bodies == []


def test_no_server_is_one_line(capsys: Captured) -> None:
    assert chat.main(["--url", "127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert said == "shoal chat: no server at http://127.0.0.1:1; start one with `shoal serve`, or say --url\n"


# ---------------------------------------------------------------- in a terminal


@pytest.fixture
def terminal(talk: Conversation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
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


def test_commands(fake: Fake, talk: Conversation, terminal: Callable[..., str], tmp_path: Path) -> None:
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
    assert figures(Answer()) == ""
    full = Answer("x", 3, "length", 10, 8, 21, first_s=0.5, last_s=2.5)
    said = "cut at the longest answer allowed · 21 tokens · prompt 10, 8 cached · 10.0 tokens/s · first after 0.50 s"
    assert figures(full) == said
    stopped = Answer("x", 3, "stopped", first_s=0.5, last_s=2.5)
    assert figures(stopped) == "stopped · about 3 tokens · first after 0.50 s"
    assert Answer(output_tokens=1, first_s=1.0, last_s=1.0).tokens_per_s is None


def test_transcripts() -> None:
    messages = [{"role": "user", "content": "hé\n"}]
    assert transcript(messages, as_json=False) == "## user\n\nhé\n"
    assert json.loads(transcript(messages, as_json=True)) == messages
