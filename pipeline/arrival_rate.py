"""How fast prompts arrive, as a policy can tell from what waits before each of its steps."""

import math

LATELY_S = 2.0  # over which the mean is taken


class ArrivalRate:
    """Prompt tokens that arrive per second of steps. The seconds are predicted ones, without those between steps: where
    nothing runs, nothing has to keep up."""

    def __init__(self) -> None:
        self.tokens_s = 0.0
        self._waiting = 0  # after the last step

    def see(self, waiting: int, taken: int, seconds: float) -> None:
        """`waiting` tokens wait, after a step of `seconds` that took `taken` of those that waited before."""
        if seconds <= 0:
            return
        came = max(0, waiting - (self._waiting - taken))
        self._waiting = waiting
        self.tokens_s += (1 - math.exp(-seconds / LATELY_S)) * (came / seconds - self.tokens_s)
