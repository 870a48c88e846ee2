"""The sequences that have a slot: their row in the ranks' page tables and in the sampler."""

from bisect import insort
from collections.abc import Iterator

import numpy as np

from worker.request import Sequence


class Running:
    """By rank: higher priority first, then earlier arrival."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._sequences: list[Sequence] = []
        self._rows: np.ndarray | None = None
        # Those that got a slot in the newest step. Slots given up since the engine cleared it.
        self.started: list[Sequence] = []
        self.vacated: list[int] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def rows(self) -> np.ndarray:
        """Theirs in the counts, int64."""
        if self._rows is None:
            self._rows = np.array([seq.row for seq in self._sequences], dtype=np.int64)
        return self._rows

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    @property
    def last(self) -> Sequence:
        """The one that ranks below all others."""
        return self._sequences[-1]

    def seat(self, seq: Sequence) -> None:
        """Gives it a slot."""
        seq.slot = self._free_slots.pop()
        insort(self._sequences, seq, key=lambda s: s.rank)
        self._rows = None
        self.started.append(seq)

    def vacate(self, seq: Sequence) -> None:
        """Takes its slot."""
        self._sequences.remove(seq)
        self._rows = None
        self._free_slots.append(seq.slot)
        self.vacated.append(seq.slot)
        seq.slot = -1

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is in one place."""
        slots = [*self._free_slots, *(seq.slot for seq in self._sequences)]
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost, or in two hands"
        assert self._sequences == sorted(self._sequences, key=lambda seq: seq.rank)
        assert self.rows.tolist() == [seq.row for seq in self._sequences]
