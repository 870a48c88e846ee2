"""The argument parser of every command, and its help: no word is broken, at any width of the terminal."""

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MAX_COLUMNS = 120  # columns: longer lines are hard to read
ENTRY = re.compile(r"( *\S.*?)( {2,})(\S.*)")
MAX_TEXT_COLUMN = 30  # most columns before an entry's text; after a longer term, the text starts on the next line
QUOTED_SPACE = "\0"  # for spaces inside quotes, where a command must not be broken


class Parser(argparse.ArgumentParser):
    """The argument parser of one command. `prog` is what the user types; `usage` is what follows it."""

    def __init__(self, prog: str, description: str, epilog: str | None = None, usage: str = "[options]") -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=description,
            epilog=epilog,
            formatter_class=Help,
            allow_abbrev=False,
        )

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parses like argparse. The error for an unknown option suggests the closest one."""
        parsed, unknown = self.parse_known_args(None if args is None else list(args), namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists what there is"
            self.error(f"no {'option' if name.startswith('-') else 'argument'} {name!r}; {hint}")
        return parsed


class Help(argparse.HelpFormatter):
    """Formats help. Descriptions and epilogs are filled by `fill`; no line break cuts a word, a name with hyphens or a
    URL."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=columns())

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and "\n".join(_wrap(heading, self._width - 1)))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(fill(text, width), indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(" ".join(text.split()), width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Puts an option's value on a line of its own if both together are too long."""
        indent = " " * (self._current_indent + 2)
        return f"\n{indent}".join(_wrap(super()._format_action_invocation(action), self._width - len(indent)))


def columns() -> int:
    """The number of columns that a line of help may take in this terminal."""
    return min(shutil.get_terminal_size().columns, MAX_COLUMNS)


def fill(text: str, width: int) -> str:
    """`text` in lines of `width` columns.

    - A paragraph is filled.
    - An indented line, or an entry (a term, at least two spaces, a text), stays apart. What does not fit on it is
      indented further.
    - A command that continues on the next line ends in a backslash, so that it can be copied.
    """
    return "\n".join(_filled(text.strip("\n").splitlines(), width)).rstrip("\n")


def _filled(lines: Sequence[str], width: int) -> Iterator[str]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line and not line.startswith(" ") and not ENTRY.fullmatch(line):
            paragraph.append(line)
            continue
        yield from _wrap(" ".join(paragraph), width)
        paragraph.clear()
        yield from _apart(line, width)


def _apart(line: str, width: int) -> list[str]:
    """The lines for a line that stays apart; an empty line stays empty."""
    indent = " " * (len(line) - len(line.lstrip()))
    entry = ENTRY.fullmatch(line)
    term = entry[1] if entry else line
    if re.search(r"\bshoal [a-z]", term):
        whole = re.sub(r"'[^']*'|\"[^\"]*\"", lambda quoted: quoted[0].replace(" ", QUOTED_SPACE), term)
        *first, last = (part.replace(QUOTED_SPACE, " ") for part in _wrap(whole, width - 2, indent + "    "))
        lines = [*(f"{part} \\" for part in first), last]
    else:
        lines = _wrap(term, width, indent + "    ") or [""]
    if not entry:
        return lines
    at = len(term + entry[2])
    if at <= min(MAX_TEXT_COLUMN, width // 2):
        return _wrap(line, width, " " * at)
    if len(line) <= width:
        return [line]
    return lines + _wrap(f"{indent}      {entry[3]}", width, f"{indent}      ")


def _wrap(text: str, width: int, hanging: str = "") -> list[str]:
    return textwrap.wrap(text, max(width, 1), subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
