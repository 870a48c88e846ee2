"""How many threads fill the masks of a batch.

Threads wait for each other, and outputs of one grammar wait for the automata that they share. So several threads pay
where masks take long, and how long that is depends on the machine. Here both ways are timed, by engine.
"""

from dataclasses import dataclass

QUICK_S = 1e-3  # what one thread does in this time is left to it
_TRY_EVERY = 64  # fills between two attempts in the other way
_WEIGHT = 0.25  # of a new time
_MOST_RISE = 2.0  # a single time counts as this many times the average at most: a grammar may be new


@dataclass
class _Ways:
    """Seconds for a mask, moving averages: on one thread, and on several."""

    one_s: float = 0.0
    several_s: float = 0.0
    fills: int = 0


class MaskThreads:
    """The choice between one thread and `several`. Not thread-safe."""

    def __init__(self, several: int) -> None:
        self._several = several
        self._ways: dict[str, _Ways] = {}

    def choose(self, engine: str, count: int) -> int:
        """The number of threads for the masks of `count` outputs that `engine` follows."""
        ways = self._ways.setdefault(engine, _Ways())
        if self._several == 1 or count * ways.one_s < QUICK_S:
            return 1
        ways.fills += 1
        is_quicker = ways.several_s < ways.one_s
        return self._several if is_quicker != (ways.fills % _TRY_EVERY == 0) else 1

    def took(self, engine: str, threads: int, count: int, seconds: float) -> None:
        """Learns what such a fill took."""
        ways = self._ways.setdefault(engine, _Ways())
        mask_s = seconds / count
        if threads == 1:
            ways.one_s = _average(ways.one_s, mask_s)
        else:
            ways.several_s = _average(ways.several_s, mask_s)


def _average(known_s: float, new_s: float) -> float:
    if not known_s:
        return new_s
    return known_s + _WEIGHT * (min(new_s, _MOST_RISE * known_s) - known_s)
