"""The chat in a terminal: prompt and commands, answers as Markdown."""

import os
import readline
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from shoal.chat_conversation import Conversation, transcript
from shoal.client import Answer, ServerError
from shoal.markdown import stream

COMMANDS = {
    "/help": "this list",
    "/reset": "forget the conversation; the system prompt stays",
    "/system TEXT": "set the system prompt and forget the conversation; without TEXT show it, with - remove it",
    "/save FILE": "write the conversation to FILE, as Markdown, or as JSON messages if it ends in .json",
    "/stats": "show or hide the line of figures under an answer",
    "/quit": "leave, as Ctrl-D does",
}


class ChatTerminal:
    """The interactive chat: a prompt with history and editing, answers as Markdown, figures under them."""

    def __init__(self, talk: Conversation) -> None:
        self.talk = talk
        self.console = Console(highlight=False)
        self.figures = True

    def run(self) -> None:
        """Runs until /quit or Ctrl-D."""
        self.console.print(f"[bold]{self.talk.model}[/] [dim]at {self.talk.client.url} · /help, Ctrl-D leaves[/]\n")
        history = ChatHistory()
        readline.set_completer(_complete)
        readline.set_completer_delims("")
        readline.parse_and_bind("tab: complete")
        try:
            while (line := self._read()) is not None:
                if line.startswith("/"):
                    if not self._command(line):
                        return
                elif line:
                    self._ask(line)
        finally:
            history.save()

    def _read(self) -> str | None:
        """Returns a line, or several if each but the last ends in a backslash; None at the end of the input. Ctrl-C
        drops the line."""
        lines: list[str] = []
        while True:
            # \x01 and \x02 tell readline that the characters between them take no room.
            prompt = "\x01\x1b[1;36m\x02> \x01\x1b[0m\x02" if not lines else "\x01\x1b[2m\x02. \x01\x1b[0m\x02"
            try:
                line = typed(prompt)
            except EOFError:
                self.console.print()
                return None
            except KeyboardInterrupt:
                self.console.print("\n[dim]Ctrl-D or /quit leaves[/]")
                return ""
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines).strip()

    def _ask(self, question: str) -> None:
        self.console.print()
        try:
            with silent_keyboard():
                answer = self.talk.ask(question, lambda pieces: stream(self.console, pieces))
        except ServerError as error:
            self.console.print(f"{error}", style="red", markup=False)
            self.console.print("[dim]the question was not kept; /reset starts over[/]\n")
            return
        if self.figures or answer.finish_reason == "stopped":
            self.console.print(figures(answer), style="dim", markup=False)
        self.console.print()

    def _command(self, line: str) -> bool:
        """Runs a /command. Returns false if it leaves the chat."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                for command, what in COMMANDS.items():
                    self.console.print(f"  [cyan]{command:<13}[/] [dim]{what}[/]")
                self.console.print("  [dim]a line that ends in \\ goes on in the next; Ctrl-C stops an answer[/]")
            case "/reset":
                self.talk.reset()
                self._say("the conversation is forgotten")
            case "/system":
                self._system(rest)
            case "/stats":
                self.figures = not self.figures
                self._say(f"figures are {'shown' if self.figures else 'hidden'}")
            case "/save":
                self._save(rest)
            case _:
                self._say(f"no command {name}; /help lists them")
        self.console.print()
        return True

    def _system(self, text: str) -> None:
        if not text:
            self._say(self.talk.system or "there is no system prompt")
            return
        self.talk.system = None if text == "-" else text
        self.talk.reset()
        self._say(
            "set; the conversation is forgotten" if self.talk.system else "removed; the conversation is forgotten"
        )

    def _save(self, name: str) -> None:
        if not name:
            self._say("say where: /save FILE")
            return
        path = Path(name).expanduser()
        try:
            path.write_text(transcript(self.talk.messages, as_json=path.suffix == ".json"), encoding="utf-8")
        except OSError as error:
            self._say(f"not saved: {path}: {error.strerror}")
        else:
            self._say(f"{len(self.talk.messages)} messages saved to {path}")

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)


class Resumed(Exception):
    """Raised when the chat continues after Ctrl-Z. `text` is what had been typed."""

    def __init__(self, text: str) -> None:
        self.text = text


def typed(prompt: str) -> str:
    """Reads a line like `input`. When the chat continues after Ctrl-Z, shows the prompt again with what had been
    typed."""
    text = ""
    modes: list[Any] = []  # modes of the terminal while a line is edited

    def started() -> None:
        readline.insert_text(text)
        with suppress(termios.error):  # no terminal
            modes[:] = termios.tcgetattr(sys.stdin)

    def resumed(signum: int, frame: FrameType | None) -> None:
        if there := readline.get_line_buffer():
            raise Resumed(there)
        # Either nothing was typed, or the line is complete and `input` is about to return it: do not raise. The shell
        # has left the terminal with modes of its own: restore ours. In the background (`bg`) that fails.
        with suppress(termios.error):
            if modes:
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, modes)
        print(prompt.translate({1: None, 2: None}), end="", flush=True)

    while True:
        # Only a new `input` draws the line again: readline believes that the line is still on the screen.
        readline.set_startup_hook(started)
        try:
            before = signal.signal(signal.SIGCONT, resumed)
            try:
                return input(prompt)
            finally:
                signal.signal(signal.SIGCONT, before)
        except Resumed as stopped:
            text = stopped.text
        finally:
            readline.set_startup_hook(None)


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Turns the terminal's echo off, so that keys typed during an answer do not show in it. The next prompt gets
    them."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def figures(answer: Answer) -> str:
    """The line under an answer: its tokens, how much of the prompt was cached, how fast it came."""
    parts = []
    if answer.finish_reason == "stopped":
        parts.append("stopped")
    if answer.finish_reason == "length":
        parts.append("cut at the longest answer allowed")
    if answer.output_tokens is not None:
        parts.append(f"{answer.output_tokens} tokens")
    elif answer.pieces:
        parts.append(f"about {answer.pieces} tokens")
    if answer.prompt_tokens is not None:
        cached = f", {answer.cached_tokens} cached" if answer.cached_tokens is not None else ""
        parts.append(f"prompt {answer.prompt_tokens}{cached}")
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.first_s is not None:
        parts.append(f"first after {answer.first_s:.2f} s")
    return " · ".join(parts)


def _complete(text: str, state: int) -> str | None:
    names = [command.split()[0] for command in COMMANDS]
    found = [name for name in names if text.startswith("/") and name.startswith(text)]
    return found[state] if state < len(found) else None


class ChatHistory:
    """The lines typed before, across chats, kept in $XDG_STATE_HOME/shoal or ~/.local/state/shoal."""

    def __init__(self) -> None:
        state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
        self._path = state / "shoal" / "chat_history"
        try:
            readline.read_history_file(self._path)
        except OSError:
            readline.clear_history()  # none yet, or not readable: the chat works without

    def save(self) -> None:
        """Keeps the last thousand lines, readable for this user only."""
        readline.set_history_length(1000)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            readline.write_history_file(self._path)
        except OSError:
            pass  # a read-only home is no reason to fail on leaving
