"""The chat in a terminal: prompt and commands, answers as Markdown, thinking folded, calls of tools as they run."""

import os
import readline
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from shoal.chat_conversation import MANY_ROUNDS, ChatConversation, transcript
from shoal.chat_tools import printable, shown
from shoal.client import ChatAnswer, ServerError, Streamed, StreamedCall, ThoughtPiece
from shoal.markdown import stream

COMMANDS = {
    "/help": "this list",
    "/retry": "ask the last question again; the new answer replaces the last one",
    "/edit": "change the last question; the new one, and its answer, replace the last",
    "/undo": "forget the last question and its answer",
    "/think": "show what the model thought before its last answer",
    "/tools": "list the tools that the model may call, and whether they run without asking",
    "/reset": "forget the conversation; the system prompt stays",
    "/system TEXT": "set the system prompt and forget the conversation; without TEXT show it, with - remove it",
    "/save FILE": "write the conversation to FILE, as Markdown, or as JSON messages if it ends in .json",
    "/stats": "show or hide the line of figures under an answer",
    "/quit": "leave, as Ctrl-D does",
}
HINTS = (
    "a line that ends in \\ goes on in the next; Ctrl-C stops an answer or a tool",
    "shoal chat --tool MODULE:FUNCTION gives the model a Python function that it may call",
)
RESULT_LINES = 6  # of a tool's result, shown


class ChatTerminal:
    """The interactive chat: a prompt with history and editing, answers as Markdown, figures under them."""

    def __init__(self, talk: ChatConversation) -> None:
        self.talk = talk
        self.console = Console(highlight=False)
        self.figures = True

    def run(self) -> None:
        """Runs until /quit or Ctrl-D."""
        self.console.print(
            f"[bold]{self.talk.model}[/] [dim]at {self.talk.client.url} · /help, Ctrl-C stops an answer, "
            "Ctrl-D leaves[/]\n"
        )
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

    def _read(self, before: str = "") -> str | None:
        """Returns a line, or several if each but the last ends in a backslash; None at the end of the input. `before`
        stands in the prompt, to be edited. Ctrl-C drops the line."""
        lines: list[str] = []
        old = before.replace("\n", "\\\n").split("\n")
        while True:
            # \x01 and \x02 tell readline that the characters between them take no room.
            prompt = "\x01\x1b[1;36m\x02> \x01\x1b[0m\x02" if not lines else "\x01\x1b[2m\x02. \x01\x1b[0m\x02"
            try:
                line = typed(prompt, old.pop(0) if old else "")
            except EOFError:
                self.console.print()
                return None
            except KeyboardInterrupt:
                self.console.print("\n[dim]Ctrl-D or /quit leaves[/]")
                return ""
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines).strip()

    def _ask(self, question: str, again: bool = False) -> None:
        self._answer(lambda: self.talk.ask(question, self._show, self._call, again))

    def _answer(self, ask: Callable[[], ChatAnswer]) -> None:
        """Shows an answer as it comes, or the error."""
        self.console.print()
        kept = self.talk.messages
        try:
            answer = ask()
        except ServerError as error:
            self.console.print(f"{error}", style="red", markup=False)
            self.console.print("[dim]the question was not kept; /retry asks it again, /reset starts over[/]\n")
            return
        if answer.finish_reason == "rounds":
            self._say(MANY_ROUNDS)
        elif self.talk.messages is kept and answer.finish_reason != "stopped":
            self._say("no answer; the question was not kept")
        if self.figures or answer.finish_reason == "stopped":
            self._say(figures(answer))
        self.console.print()

    def _show(self, pieces: Iterable[Streamed]) -> None:
        """Shows the text of an answer, and what else it has while that comes."""
        with silent_keyboard():
            for kind, group in groupby(pieces, type):
                if kind is ThoughtPiece:
                    self._show_thinking(piece.text for piece in group if isinstance(piece, ThoughtPiece))
                elif kind is StreamedCall:
                    with Live(console=self.console, refresh_per_second=12, transient=True) as live:
                        for call in group:
                            assert isinstance(call, StreamedCall)
                            live.update(Progress(f"calls {printable(call.name)} …", call.arguments))
                else:
                    stream(self.console, (piece for piece in group if isinstance(piece, str)))

    def _show_thinking(self, pieces: Iterable[str]) -> None:
        thinking, began = "", time.perf_counter()
        try:
            with Live(console=self.console, refresh_per_second=12, transient=True) as live:
                for piece in pieces:
                    thinking += piece
                    live.update(Progress("thinking …", thinking))
        finally:
            time_s = time.perf_counter() - began
            self._say(f"thought for {time_s:.1f} s, {words(thinking)}; /think shows it")
            self.console.print()

    def _call(self, call: StreamedCall) -> str:
        """Runs a call of a tool, if the user allows it. Returns what the model reads."""
        self.console.print(shown(call.name, call.arguments), style="cyan", markup=False)
        result = self.talk.tools.answer(call, self._permits)
        lines = printable(result).rstrip("\n").split("\n")
        for line in lines[:RESULT_LINES]:
            self.console.print(Text(line, "dim"), no_wrap=True, overflow="ellipsis")
        if len(lines) > RESULT_LINES:
            self._say(f"… {len(lines) - RESULT_LINES} more lines")
        self.console.print()
        return result

    def _permits(self, call: StreamedCall) -> bool:
        if sys.stdin.isatty():  # what was typed before the question is no answer to it
            with suppress(termios.error):
                termios.tcflush(sys.stdin, termios.TCIFLUSH)
        readline.set_auto_history(False)
        try:
            while True:
                match typed("run it? [y]es / [n]o / [a]lways for this tool: ").strip().lower():
                    case "y" | "yes":
                        return True
                    case "n" | "no":
                        return False
                    case "a" | "always":
                        self.talk.tools.allowed.add(call.name)
                        return True
        except EOFError:
            self.console.print()
            return False
        finally:
            readline.set_auto_history(True)

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
                for hint in HINTS:
                    self.console.print(f"  {hint}", style="dim", markup=False)
            case "/retry" | "/edit" if self.talk.question is None:
                self._say("there is no question yet")
            case "/retry":
                self._answer(lambda: self.talk.retry(self._show, self._call))
                return True
            case "/edit":
                if question := self._read(self.talk.question or ""):
                    self._ask(question, again=True)
                return True
            case "/undo":
                self._say("the last question is forgotten" if self.talk.undo() else "there is no question yet")
            case "/think":
                self._say(printable(self.talk.thinking) or "the model did not think before its last answer")
            case "/tools":
                self._tools()
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

    def _tools(self) -> None:
        tools = self.talk.tools
        if not tools.tools:
            self._say("there are none; shoal chat --tool MODULE:FUNCTION gives the model one")
        for tool in tools.tools.values():
            how = "runs without asking" if tool.name in tools.allowed else "asks"
            line = Text.assemble("  ", (f"{tool.name}({', '.join(tool.parameters['properties'])})", "cyan"))
            self.console.print(line.append(f" {how} · {printable(tool.description)}", "dim"))

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


@dataclass(frozen=True)
class Progress:
    """A line for text that is not shown while it grows: how many words it has, and its last ones."""

    title: str
    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        said = f"{self.title} {words(self.text)}"
        lines = self.text[-options.max_width :].strip().splitlines()
        end = printable(lines[-1]) if lines else ""
        while cell_len(end) > max(0, options.max_width - len(said) - 4):
            end = end[1:]
        yield Text(f"{said} · {end.lstrip()}" if end else said, "dim", no_wrap=True, overflow="crop")


def words(text: str) -> str:
    """How long a text is: `3 words`."""
    number = len(text.split())
    return f"{number} word{'' if number == 1 else 's'}"


class Resumed(Exception):
    """Raised when the chat continues after Ctrl-Z. `text` is what had been typed."""

    def __init__(self, text: str) -> None:
        self.text = text


def typed(prompt: str, text: str = "") -> str:
    """Reads a line like `input`; `text` stands in it from the beginning. When the chat continues after Ctrl-Z, shows
    the prompt again with what had been typed."""
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


def figures(answer: ChatAnswer) -> str:
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
