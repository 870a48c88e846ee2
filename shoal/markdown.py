"""Markdown in a terminal while it is still being written."""

import re
from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment


class _Tail:
    """The last lines of rendered Markdown: as many as the terminal shows. A live display cannot redraw lines that have
    scrolled away."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_markdown(self._text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def stream(console: Console, pieces: Iterable[str]) -> None:
    """Prints pieces of Markdown as they come. A complete block is printed for good. Only the last block, still growing,
    is drawn again and again, so that an answer of any length scrolls like text. What was shown stays when `pieces`
    raises."""
    text = ""
    with Live(console=console, refresh_per_second=12, transient=True, vertical_overflow="crop") as live:
        try:
            for piece in pieces:
                text += piece
                *done, text = blocks(text)
                if done:
                    live.update("")
                for block in done:
                    _print(console, block)
                live.update(_Tail(text))
        finally:
            live.update("")
            if text.strip():
                _print(console, text)


def _markdown(text: str) -> Markdown:
    return Markdown(text, code_theme="ansi_dark")  # the terminal's own colours, which suit its background


def _print(console: Console, block: str) -> None:
    if block.strip():
        console.print(_markdown(block.strip("\n")))
        console.print()


def blocks(text: str) -> Iterator[str]:
    """Cuts Markdown at the blank lines between blocks, but not inside a code fence. The last block may be unfinished,
    or empty. The blocks joined are the text."""
    start = position = 0
    fence = ""
    while (end := text.find("\n", position)) != -1:
        line = text[position:end].strip()
        if fence:
            if line.startswith(fence) and not line.strip(fence[0]):
                fence = ""
        elif opening := re.match(r"`{3,}|~{3,}", line):
            fence = opening.group()
        elif not line and text[start:position].strip():
            yield text[start : end + 1]
            start = end + 1
        position = end + 1
    yield text[start:]
