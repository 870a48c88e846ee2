"""When the stages are going to be done with what was sent to them: predicted, set right by what has ended."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass
class _Sent:
    """When a step was sent, the predicted seconds of each stage, and when those that are done with it were."""

    at_s: float
    seconds: Sequence[float]
    ends_s: dict[int, float]


class Ahead:
    """What is on its way through `stages`, in the order in which it was sent."""

    def __init__(self, stages: int = 1) -> None:
        self._sent: dict[int, _Sent] = {}
        self._left_s = [-math.inf] * stages  # when what has been through left each

    def sent(self, step: int, at_s: float, seconds: Sequence[float]) -> None:
        """A step is sent, which is predicted to take each stage so long."""
        self._sent[step] = _Sent(at_s, seconds, {})

    def ended(self, step: int, stage: int, at_s: float) -> None:
        """A stage is done with it. Steps come in order from each stage."""
        self._left_s[stage] = at_s
        if step in self._sent:
            self._sent[step].ends_s[stage] = at_s
            if stage == len(self._left_s) - 1:
                del self._sent[step]

    def failed(self, step: int) -> None:
        """It is not going to end."""
        self._sent.pop(step, None)

    def free_s(self, now_s: float) -> float:
        """Until the first stage is done with all of it."""
        free_s = self._left_s[0]
        for _, ends_s in self._ends():
            free_s = ends_s[0]
        return max(0.0, free_s - now_s)

    def returning_s(self, step: int, now_s: float) -> float:
        """Until the last stage is done with a step; 0 if it has been through."""
        return max(0.0, next((ends_s[-1] - now_s for one, ends_s in self._ends() if one == step), 0.0))

    def _ends(self) -> Iterator[tuple[int, list[float]]]:
        """Steps, and when each stage is done with them."""
        free_s = list(self._left_s)
        for step, sent in self._sent.items():
            end_s = sent.at_s
            for stage, seconds in enumerate(sent.seconds):
                end_s = sent.ends_s.get(stage, max(end_s, free_s[stage]) + seconds)
                free_s[stage] = end_s
            yield step, free_s
