"""The bounds of a soak: what grows is found, and what is full stays."""

from .soak import Held, broken_bounds


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
