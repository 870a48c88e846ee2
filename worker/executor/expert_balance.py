"""How evenly ranks compute that have whole experts: in every layer, all wait for the one with the most tokens."""

from collections import deque
from itertools import pairwise

import torch

EVERY_STEPS = 16
"""Steps from one whose tokens are counted to the next."""

_NEWEST_STEPS = 16  # steps whose mean `imbalance` is


class ExpertBalance:
    """Balance of the ranks of a stage, from counts of each expert's tokens, which every rank has for all of them.

    The counts of a step are copied to the host behind it, and are read when they have come. Padding of a step to the
    size of a CUDA graph counts as tokens: it is computed too.
    """

    def __init__(self, load: torch.Tensor, ranks: int) -> None:
        """load: counts since the start, int64 `[layers, experts]`, zero in layers without experts."""
        self._load, self._ranks = load, ranks
        self._at_start = load.clone()
        self._steps = 0
        self._before: torch.Tensor | None = None
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._tokens = [0] * ranks
        self._imbalances: deque[float] = deque(maxlen=_NEWEST_STEPS)

    def begin_step(self) -> None:
        """Called before a step is launched."""
        if self._steps % EVERY_STEPS == 0:
            self._before = self._load.clone()
        self._steps += 1

    def end_step(self) -> None:
        """Called when a step is launched."""
        if self._before is None:
            return
        self._read()
        counts = torch.stack((self._load - self._before, self._load - self._at_start))
        self._before, event = None, None
        if counts.is_cuda:
            event = torch.cuda.Event()
            counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
            event.record()
        self._pending.append((counts, event))

    @property
    def tokens(self) -> list[int]:
        """Pairs of a token and an expert that each rank has computed, up to the newest step that was looked at."""
        self._read()
        return list(self._tokens)

    @property
    def imbalance(self) -> float | None:
        """Pairs of the rank with the most, over the mean of the ranks: mean of the layers, and of the newest steps that
        were looked at. None before the first."""
        self._read()
        return sum(self._imbalances) / len(self._imbalances) if self._imbalances else None

    def _read(self) -> None:
        while self._pending and (self._pending[0][1] is None or self._pending[0][1].query()):
            step, since_start = (self._by_rank(counts) for counts in self._pending.popleft()[0])
            self._tokens = since_start.sum(0).tolist()
            own = step[step.sum(1) > 0].double()
            if len(own):
                self._imbalances.append(float((own.amax(1) / own.mean(1)).mean()))

    def _by_rank(self, counts: torch.Tensor) -> torch.Tensor:
        """Counts of each layer's experts, `[layers, experts]`, as those of the ranks, `[layers, ranks]`."""
        experts = counts.shape[1]
        ends = [experts * rank // self._ranks for rank in range(self._ranks + 1)]
        return torch.stack([counts[:, a:b].sum(1) for a, b in pairwise(ends)], dim=1)
