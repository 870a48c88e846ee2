"""When a stream of a rehearsal counts as whole."""

from typing import Any

import pytest

from .streams import Stream

TEXT = "ab\ufffdc\u20acd"
ENDED: dict[str, Any] = {"done": True, "finish_reason": "length"}


@pytest.mark.parametrize(
    ("text", "ended", "whole"),
    [
        (TEXT, ENDED, True),
        ("ab\ufffd", ENDED, True),
        ("ab\ufffdc\ufffd", ENDED, True),  # its last token began the next character
        ("ab\ufffdx", ENDED, False),
        ("ac", ENDED, False),
        ("", ENDED, False),
        ("ab", ENDED | {"done": False}, False),
        ("ab", ENDED | {"finish_reason": None}, False),
        ("ab", ENDED | {"error": "server_ends"}, False),
        ("ab", ENDED | {"broken": "ReadError()"}, False),
    ],
)
def test_it_ended_as_one_that_nothing_disturbed(text: str, ended: dict[str, Any], whole: bool) -> None:
    assert Stream("host", 4, text=text, **ended).is_whole(TEXT) is whole
