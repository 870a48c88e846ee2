"""Predicted times at which the stages will be done with their backlog, corrected by the steps that have ended."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass
class _Sent:
    """A step that was sent: when, its predicted seconds on each stage, and when each stage that has finished it did
    so."""

    at_s: float
    seconds: Sequence[float]
    ends_s: dict[int, float]


class StageBacklog:
    """Steps on their way through `stages`, in the order in which they were sent."""

    def __init__(self, stages: int = 1) -> None:
        self._sent: dict[int, _Sent] = {}
        self._left_s = [-math.inf] * stages  # when the newest finished step left each stage

    def sent(self, step: int, at_s: float, seconds: Sequence[float]) -> None:
        """Records that a step is sent. `seconds`: predicted time on each stage."""
        self._sent[step] = _Sent(at_s, seconds, {})

    def ended(self, step: int, stage: int, at_s: float) -> None:
        """Records that a stage has finished a step. Steps come in order from each stage."""
        self._left_s[stage] = at_s
        if step in self._sent:
            self._sent[step].ends_s[stage] = at_s
            if stage == len(self._left_s) - 1:
                del self._sent[step]

    def failed(self, step: int) -> None:
        """Drops a step that will not end."""
        self._sent.pop(step, None)

    def free_s(self, now_s: float) -> float:
        """Seconds until the first stage has finished all steps sent to it."""
        free_s = self._left_s[0]
        for _, ends_s in self._ends():
            free_s = ends_s[0]
        return max(0.0, free_s - now_s)

    def returning_s(self, step: int, now_s: float) -> float:
        """Seconds until the last stage has finished a step; 0 if it has already."""
        return max(0.0, next((ends_s[-1] - now_s for one, ends_s in self._ends() if one == step), 0.0))

    def _ends(self) -> Iterator[tuple[int, list[float]]]:
        """Steps, and when each stage finishes them."""
        free_s = list(self._left_s)
        for step, sent in self._sent.items():
            end_s = sent.at_s
            for stage, seconds in enumerate(sent.seconds):
                end_s = sent.ends_s.get(stage, max(end_s, free_s[stage]) + seconds)
                free_s[stage] = end_s
            yield step, free_s
