"""The text of a custom tool, read from the arguments of a call."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.endpoints.responses.custom_input import CustomInput, as_arguments


def read(arguments: str, cuts: list[int]) -> str:
    """The input, where the arguments come in pieces."""
    edges = [0, *sorted({cut % (len(arguments) + 1) for cut in cuts}), len(arguments)]
    reader = CustomInput()
    pieces = [reader.push(arguments[a:b]) for a, b in pairwise(edges)]
    return "".join([*pieces, reader.end()])


@given(st.text(), st.booleans(), st.lists(st.integers(0, 10_000), max_size=12))
def test_a_text_comes_back_wherever_its_arguments_are_cut(text: str, escaped: bool, cuts: list[int]) -> None:
    written = json.dumps({"input": text}) if escaped else as_arguments(text)
    assert read(written, cuts) == text


@given(st.text('{"input: \\}ud83e\n', max_size=40), st.lists(st.integers(0, 50), max_size=6))
def test_damaged_arguments_give_the_same_text_wherever_they_are_cut(arguments: str, cuts: list[int]) -> None:
    for written in (arguments, '{"input": "' + arguments):
        whole = read(written, [])
        assert read(written, cuts) == whole
        whole.encode()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb', "a\nb"),  # cut off, as the next three
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "C:\\Users"}', "C:\\Users"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"patch": "x"}', "x"),
        ('"x"', "x"),
        ("{}", ""),
        ("", ""),
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"a": "x", "input": "y"}', "y"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
    ],
)
def test_other_arguments(arguments: str, text: str) -> None:
    whole = read(arguments, [])
    assert (whole, read(arguments, list(range(len(arguments))))) == (text, text)


def test_what_is_certain_comes_at_once() -> None:
    reader: Any = CustomInput()
    assert [reader.push(piece) for piece in ('{"input": "a', "\\", "nb", '"}')] == ["a", "", "\nb", ""]
