"""Markdown that grows is cut into blocks that no later text changes, and all of it is shown once."""

import io
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shoal.markdown import blocks, stream

LINES = st.lists(st.sampled_from(["", "text", "- item", "```", "````", "~~~", "  ", "# head", "```py"]), max_size=12)


@settings(deadline=None)
@given(LINES, st.booleans())
def test_blocks_are_the_text(lines: list[str], ended: bool) -> None:
    text = "\n".join(lines) + ("\n" if ended else "")
    assert "".join(blocks(text)) == text


@settings(deadline=None)
@given(LINES, LINES)
def test_what_comes_later_does_not_change_a_finished_block(first: list[str], second: list[str]) -> None:
    text = "\n".join(first) + "\n"
    *done, rest = blocks(text)
    assert list(blocks(text + "\n".join(second)))[: len(done)] == done
    assert list(blocks(rest)) == [rest]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", [""]),
        ("a\n\nb", ["a\n\n", "b"]),
        ("a\nb", ["a\nb"]),
        ("```\na\n\nb\n```\n\nc", ["```\na\n\nb\n```\n\n", "c"]),
        ("````\n```\n\n````\n\nc", ["````\n```\n\n````\n\n", "c"]),
        ("~~~\n```\n\n~~~\n\nc", ["~~~\n```\n\n~~~\n\n", "c"]),
        ("\n\na\n\n", ["\n\na\n\n", ""]),
    ],
)
def test_blocks_end_at_blank_lines_outside_of_code(text: str, parts: list[str]) -> None:
    assert list(blocks(text)) == parts


def shown(pieces: list[str], height: int = 10) -> str:
    out = io.StringIO()
    stream(Console(file=out, width=40, height=height, force_terminal=False), pieces)
    return out.getvalue()


def test_an_answer_is_shown_once_however_it_is_cut_and_long_it_is() -> None:
    text = "# Title\n\nSome *words* here.\n\n```py\nx = 1\n\ny = 2\n```\n\n" + "\n".join(
        f"- item {n}" for n in range(40)
    )
    output = shown(list(text))
    for words in ("Title", "Some words here.", "x = 1", "y = 2", *(f"item {n}\n" for n in (1, 20, 39))):
        assert "\n".join(line.rstrip() for line in output.splitlines()).count(words.strip("\n") + "\n") == 1, words


def test_what_was_shown_stays_when_the_answer_breaks_off() -> None:
    def pieces() -> Iterator[str]:
        yield "so far"
        raise KeyboardInterrupt

    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        stream(Console(file=out, width=40), pieces())
    assert "so far" in out.getvalue()
