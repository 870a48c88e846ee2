"""How much work lies before the first stage."""

from collections import deque


class Ahead:
    """Predicted from what was sent, set right by what has ended."""

    def __init__(self) -> None:
        self._pending: deque[float] = deque()  # predicted seconds of what was sent and has not ended
        self._free_at_s = 0.0

    def sent(self, at_s: float, predicted_s: float) -> None:
        self._pending.append(predicted_s)
        self._free_at_s = max(self._free_at_s, at_s) + predicted_s

    def ended(self, at_s: float) -> None:
        """The oldest has left the stage."""
        self._pending.popleft()
        self._free_at_s = at_s + sum(self._pending)

    def seconds(self, now_s: float) -> float:
        """Until the stage is done with all of it."""
        return max(0.0, self._free_at_s - now_s)
