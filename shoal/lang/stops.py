"""Stop strings in a text that grows."""

from collections.abc import Sequence


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, int] | None:
    """Where the stop string that is complete first begins and ends, at or after `start`; of those that end together,
    the longest."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    if not found:
        return None
    end, at = min(found)
    return at, end


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
