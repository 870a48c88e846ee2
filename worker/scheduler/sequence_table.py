"""The progress of all live sequences as NumPy columns, so that a step of hundreds of decodes is counted in a few
operations."""

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np


class Tabled(Protocol):
    """A sequence that has a row in the table."""

    row: int


S = TypeVar("S", bound=Tabled)


class SequenceTable(Generic[S]):
    """Per-sequence counters as NumPy columns, one row per live sequence. A sequence keeps its row from arrival to end.

    Columns are int32 where no other dtype is given.

    | column | meaning |
    | --- | --- |
    | `tokens` | prompt + output tokens, including those still being sampled |
    | `pending` | trailing tokens of `tokens` whose value the host does not know yet (steps in flight sample them) |
    | `computed` | leading tokens whose KV is computed, or will be by the steps in flight |
    | `confirmed` | leading tokens whose KV was computed by steps that have ended |
    | `prompt` | prompt tokens |
    | `limit` | value of `tokens` at which the sequence ends at the latest |
    | `expected` | value of `tokens` at which it probably ends; `limit` unless the policy is `longest_first` |
    | `pages` | KV pages that the sequence holds |
    | `sent` | leading pages that the ranks have been told of |
    | `slots` | slot of a running sequence; -1 while it waits |
    | `last_token` | id of the newest known token |
    | `cached` | leading tokens that the prefix tree had when it was last asked; kept up to date only while waiting |
    | `answered_s` | float64, when the newest output token arrived, on the scheduler's clock; before that, the arrival |
    | `announced` | bool, whether the first output has been made |

    Invariant: `confirmed <= computed <= tokens` and `confirmed <= tokens - pending`.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: initial number of rows. When all are in use, it doubles, which copies every column."""

        def column() -> np.ndarray:
            return np.zeros(capacity, dtype=np.int32)

        self.tokens, self.pending, self.computed, self.confirmed = column(), column(), column(), column()
        self.prompt, self.limit, self.expected = column(), column(), column()
        self.pages, self.sent, self.slots = column(), column(), column()
        self.last_token = column()
        self.cached = column()
        self.answered_s = np.zeros(capacity)
        self.announced = np.zeros(capacity, dtype=bool)
        self.sequences: list[S | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def add(self, seq: S) -> int:
        """Assigns a row to a new sequence, which waits, and returns the row. Counters begin at 0; the
        sequence sets `prompt`, `limit`, `expected`, `last_token` and `answered_s`."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.sequences[row] = seq
        for column in (self.tokens, self.pending, self.computed, self.confirmed, self.pages, self.sent, self.cached):
            column[row] = 0
        self.slots[row] = -1
        self.announced[row] = False
        return row

    def remove(self, row: int) -> None:
        """Frees the row of a sequence that has ended."""
        self.sequences[row] = None
        self._free.append(row)

    def _grow(self) -> None:
        capacity = len(self.sequences)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        self.sequences += [None] * capacity
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))

    def check_integrity(self, sequences: Iterable[S]) -> None:
        """Raises AssertionError unless `sequences` are exactly those in the table, each at its row."""
        assert {seq.row: seq for seq in sequences} == {row: seq for row, seq in enumerate(self.sequences) if seq}
        free = set(self._free)
        assert len(free) == len(self._free) == self.sequences.count(None)

    def sequences_at(self, rows: np.ndarray) -> list[S]:
        """The sequences of `rows`, int64. All rows must be in use."""
        sequences = self.sequences
        return [sequences[row] for row in rows.tolist()]


class TableColumn:
    """Descriptor: an attribute of a sequence that reads and writes its row of a column."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __get__(self, seq: Any, owner: type) -> int:
        return int(getattr(seq.counts, self._column)[seq.row])

    def __set__(self, seq: Any, value: int) -> None:
        getattr(seq.counts, self._column)[seq.row] = value
