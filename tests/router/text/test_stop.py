"""Stop strings, against looking for them in the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopMatcher


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Reads one character after the other and asks whether the text now ends with a stop string."""
    for end in range(1, len(text) + 1):
        longest = max((len(stop) for stop in stops if text[:end].endswith(stop)), default=0)
        if longest:
            return text[: end - longest], True
    return text, False


def streamed(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        new, stopped = matcher.push(piece)
        text += new
        if stopped:
            return text, True
    return text + matcher.flush(), False


letters = st.text("ab\n", max_size=12)


@given(st.lists(letters, max_size=6), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3).map(tuple))
def test_equals_looking_at_the_whole_text(pieces: list[str], stops: tuple[str, ...]) -> None:
    assert streamed(pieces, stops) == naive("".join(pieces), stops)


@given(letters, st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple))
def test_holds_back_only_what_may_become_a_stop_string(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    released = ""
    for character in text:
        new, stopped = matcher.push(character)
        released += new
        if stopped:
            return
        held = text[len(released) : len(released) + len(matcher._held)]
        assert released + held == text[: len(released) + len(held)]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello", " wor", "ld"], ("o w",), ("Hell", True)),
        (["abcd"], ("abcd", "bc"), ("a", True)),  # the one that is complete first
        (["xbc"], ("bc", "xbc"), ("", True)),  # of two that end together the longer
        (["aaab"], ("aab",), ("a", True)),  # overlaps with itself
        (["\n", "\n"], ("\n\n",), ("", True)),
        (["ab"], ("abc",), ("ab", False)),  # what was held back comes at the end
        (["🦊", "🦊!"], ("🦊!",), ("🦊", True)),
        (["anything"], (), ("anything", False)),
    ],
)
def test_examples(pieces: list[str], stops: tuple[str, ...], expected: tuple[str, bool]) -> None:
    assert streamed(pieces, stops) == expected


@given(st.lists(letters, max_size=6), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3).map(tuple))
def test_the_stop_string_may_be_kept_and_nothing_is_held_back(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops, include=True)
    seen = ""
    for piece in pieces:
        new, stopped = matcher.push(piece)
        seen += new
        ends = [end for end in range(1, len(seen) + 1) if seen[:end].endswith(stops)] if stops else []
        assert ends == ([len(seen)] if stopped else []) and matcher.flush() == ""
        if stopped:
            return
        assert new == piece


def test_long_stop_strings_cost_no_more_than_short_ones() -> None:
    matcher = StopMatcher(("a" * 100_000 + "b",))
    text = "a" * 100_000 + "c"
    new, stopped = matcher.push(text)
    assert (new, stopped) == (text, False)
