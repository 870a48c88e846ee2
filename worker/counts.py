"""How far every sequence is, in arrays: a step of hundreds of decodes is then counted in a few operations."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from worker.request import Sequence


class Counts:
    """Columns int32 with a row for every sequence, its own from its arrival to its end.

    Of its `tokens`, which are the prompt's and the outputs', the last `pending` are being sampled by steps in flight:
    they count, and their values are not known yet. `computed` of them have their KV, by steps in flight too; steps that
    have ended computed `confirmed`. It ends when it has `limit` tokens, and is likely to with `expected` (where a
    policy asks). It holds `pages` pages, of which the ranks know the first `sent`. `slots` is -1 while it waits; the
    tree had `cached` of its tokens when it was last asked then. It got its last token at `answered_s` of the
    scheduler's clock, or came then.
    """

    def __init__(self, capacity: int) -> None:
        """Up to `capacity` sequences at once."""

        def column() -> np.ndarray:
            return np.zeros(capacity, dtype=np.int32)

        self.tokens, self.pending, self.computed, self.confirmed = column(), column(), column(), column()
        self.prompt, self.limit, self.expected = column(), column(), column()
        self.pages, self.sent, self.slots = column(), column(), column()
        self.last_token = column()  # of those that are known
        self.cached = column()
        self.answered_s = np.zeros(capacity)
        self.announced = np.zeros(capacity, dtype=bool)  # its first output was sent
        self.sequences: list[Sequence | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def open(self, seq: "Sequence") -> int:
        """A row for a new sequence, which waits, and of which nothing is counted yet."""
        row = self._free.pop()
        self.sequences[row] = seq
        for column in (self.tokens, self.pending, self.computed, self.confirmed, self.pages, self.sent, self.cached):
            column[row] = 0
        self.slots[row] = -1
        self.announced[row] = False
        return row

    def close(self, row: int) -> None:
        """The sequence has ended."""
        self.sequences[row] = None
        self._free.append(row)

    def check_integrity(self, sequences: "Iterable[Sequence]") -> None:
        """Raises AssertionError unless these are all sequences, and each has its row."""
        assert {seq.row: seq for seq in sequences} == {row: seq for row, seq in enumerate(self.sequences) if seq}
        free = set(self._free)
        assert len(free) == len(self._free) == self.sequences.count(None)

    def of(self, rows: np.ndarray) -> "list[Sequence]":
        """The sequences of these rows, all of which are in use."""
        sequences = self.sequences
        return [sequences[row] for row in rows.tolist()]


class Count:
    """A sequence's entry in a column, as an attribute of it."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __get__(self, seq: "Sequence", owner: type) -> int:
        return int(getattr(seq.counts, self._column)[seq.row])

    def __set__(self, seq: "Sequence", value: int) -> None:
        getattr(seq.counts, self._column)[seq.row] = value
