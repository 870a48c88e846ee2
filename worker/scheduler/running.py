"""The running sequences. Each has a slot, its index in the ranks' page tables and in the sampler's state."""

from bisect import insort
from collections.abc import Iterator

import numpy as np

from worker.scheduler.sequence import Sequence


class RunningSequences:
    """Running sequences by rank: higher priority first, then earlier arrival."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._sequences: list[Sequence] = []
        self._rows: np.ndarray | None = None
        self._started: list[Sequence] = []
        self._freed_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def rows(self) -> np.ndarray:
        """Rows of the running sequences in the `SequenceTable`, int64, by rank."""
        if self._rows is None:
            self._rows = np.array([seq.row for seq in self._sequences], dtype=np.int64)
        return self._rows

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free_slots)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    @property
    def last(self) -> Sequence:
        """The sequence of the last rank."""
        return self._sequences[-1]

    def add(self, seq: Sequence) -> None:
        """Gives a sequence a slot."""
        seq.slot = self._free_slots.pop()
        insort(self._sequences, seq, key=lambda s: s.rank)
        self._rows = None
        self._started.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Frees the slot of a sequence."""
        self._sequences.remove(seq)
        self._rows = None
        self._free_slots.append(seq.slot)
        self._freed_slots.append(seq.slot)
        seq.slot = -1

    def take_started(self) -> list[Sequence]:
        """The sequences that got a slot since the last call."""
        started, self._started = self._started, []
        return [seq for seq in started if seq.is_running]  # some may have been preempted again

    def take_freed_slots(self) -> list[int]:
        """The slots that were freed since the last call. Some may belong to another sequence already."""
        freed, self._freed_slots = self._freed_slots, []
        return freed

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is either free or belongs to one sequence."""
        slots = [*self._free_slots, *(seq.slot for seq in self._sequences)]
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost, or in two hands"
        assert self._sequences == sorted(self._sequences, key=lambda seq: seq.rank)
        assert self.rows.tolist() == [seq.row for seq in self._sequences]
