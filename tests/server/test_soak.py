"""The bounds of a soak: what grows is found, and what is full stays. What counts as an error in it."""

from typing import Any

import httpx
import pytest

from .soak import Held, broken_bounds, is_explained


def test_what_grows_is_found() -> None:
    held = Held({})
    for number in range(20):
        first = {f"{name}.{what}": 100.0 for name in ("rank", "router") for what in ("rss", "descriptors", "threads")}
        held.rounds.append(first | {"rank.rss": 60.0 + 3 * number, "router.rss": 60.0 + 1.5 * number})
    assert broken_bounds(held.growth(0)) == ["rank.rss"]
    assert broken_bounds(held.growth(4)) == []
    for number, each in enumerate(held.rounds):
        each["router.descriptors"] += number // 5
    assert broken_bounds(held.growth(4)) == ["router.descriptors"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/ready", {"status": "not ready", "replicas": 0, "models": {}}, True),
        ("/health", {"status": "not ready", "replicas": 0, "models": {}}, False),
        ("/v1/completions", {"error": {"message": "x", "code": "no_replica"}}, True),
        ("/v1/completions", {"error": {"message": "x", "code": None}}, False),
        ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, True),
    ],
)
def test_an_answer_of_503_says_why(path: str, body: dict[str, Any], expected: bool) -> None:
    request = httpx.Request("GET", f"http://127.0.0.1{path}")
    assert is_explained(httpx.Response(503, json=body, request=request)) is expected
