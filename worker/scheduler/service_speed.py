"""The speed of a replica, in tokens of service a second, as `FairShare` counts them."""

import math

# A window of this many seconds is measured, or one step where that takes longer.
WINDOW_S = 0.25
# What of the speed remains after each window that is slower: half after 17 s. Load is light at times, and no window of
# a light load tells how fast the replica is; one of a heavy load tells it at once.
FADE = 0.99


class ServiceSpeed:
    """`tokens_s`: the most that any window served while clients competed, which fades slowly. Infinite before the
    first window."""

    def __init__(self) -> None:
        self.tokens_s = math.inf
        self._began_s: float | None = None  # the window
        self._tokens = 0.0

    def served(self, tokens: float) -> None:
        """Counts what a step computes."""
        self._tokens += tokens

    def passes(self, now_s: float, is_contended: bool) -> None:
        """Called before each step. `is_contended`: whether clients compete."""
        if self._began_s is None or not is_contended:
            self._began_s, self._tokens = now_s if is_contended else None, 0.0
            return
        if (window_s := now_s - self._began_s) >= WINDOW_S:
            rate = self._tokens / window_s
            faded = FADE * self.tokens_s if self.tokens_s < math.inf else 0.0
            self.tokens_s = max(rate, faded) or math.inf
            self._began_s, self._tokens = now_s, 0.0
