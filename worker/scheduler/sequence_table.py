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

    The table owns these values. A `Sequence` has an attribute of the same name for most of them, which reads and writes
    its row (`TableColumn`). Columns are int32 where no other dtype is given.

    | column | meaning |
    | --- | --- |
    | `num_tokens` | prompt + output tokens, including those still being sampled |
    | `num_pending` | trailing tokens whose value the host does not know yet (steps in flight sample them) |
    | `num_computed` | leading tokens whose KV is computed, or will be by the steps in flight |
    | `num_confirmed` | leading tokens whose KV was computed by steps that have ended |
    | `num_prompt` | prompt tokens |
    | `token_limit` | value of `num_tokens` at which the sequence ends at the latest |
    | `expected_tokens` | value of `num_tokens` at which it probably ends, as expected when it was last added to the queue |
    | `num_pages` | KV pages that the sequence holds |
    | `num_sent_pages` | leading pages that the ranks hold in their page tables, too |
    | `num_shared` | leading pages that belong to the tree |
    | `first_window_page` | where layers with a window have pages of their own: the first page that the sequence still holds there |
    | `slot` | slot of a running sequence; -1 while it waits |
    | `last_token` | id of the newest known token |
    | `cached_estimate` | leading tokens that the prefix tree had at the last look-up; kept current only while waiting |
    | `last_output_s` | float64, when the newest output token came, by the scheduler's clock; before that, the arrival |
    | `counts_from_s` | float64, the arrival by the scheduler's clock, less the head start |
    | `queue_class` | int64, what goes first while it waits: lower values, by higher priority, then preemption |
    | `adapter` | number of its adapter, 0 for the base model |
    | `adapter_slot` | device slot of its adapter while it runs |
    | `job` | number of its job, ascending by arrival; 0 without jobs |
    | `client` | int64, `ClientShare.index` of its client |
    | `gives_way_from` | number of the step from which a running sequence that overtook others gives way to them; 0 for one that did not |
    | `start_step` | number of the step in which it started |
    | `announced` | bool, whether the first output has been made |

    Invariant: `num_confirmed <= num_computed <= num_tokens` and `num_confirmed <= num_tokens - num_pending`.
    """  # noqa: E501

    def __init__(self, capacity: int) -> None:
        """`capacity`: initial number of rows. When all are in use, it doubles, which copies every column."""

        def column() -> np.ndarray:
            return np.zeros(capacity, dtype=np.int32)

        self.num_tokens, self.num_pending, self.num_computed, self.num_confirmed = (column() for _ in range(4))
        self.num_prompt, self.token_limit, self.expected_tokens = column(), column(), column()
        self.num_pages, self.num_sent_pages, self.num_shared = column(), column(), column()
        self.first_window_page, self.gives_way_from, self.start_step = column(), column(), column()
        self.slot, self.last_token, self.cached_estimate, self.job = column(), column(), column(), column()
        self.adapter, self.adapter_slot = column(), column()
        self.queue_class, self.client = np.zeros(capacity, dtype=np.int64), np.zeros(capacity, dtype=np.int64)
        self.last_output_s, self.counts_from_s = np.zeros(capacity), np.zeros(capacity)
        self.announced = np.zeros(capacity, dtype=bool)
        self.sequences: list[S | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def add(self, seq: S) -> int:
        """Assigns a row to a new sequence, which waits, and returns the row. Its values are 0."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.sequences[row] = seq
        for column in self._columns().values():
            column[row] = 0
        self.slot[row] = -1
        return row

    def remove(self, row: int) -> None:
        """Frees the row of a sequence that has ended."""
        self.sequences[row] = None
        self._free.append(row)

    def _grow(self) -> None:
        capacity = len(self.sequences)
        for name, column in self._columns().items():
            setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        self.sequences += [None] * capacity
        self._free = list(range(2 * capacity - 1, capacity - 1, -1))

    def _columns(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

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
    """Descriptor: an attribute of a sequence that reads and writes its row of the column of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, seq: Any, owner: type) -> int:
        value: int = getattr(seq.table, self._name).item(seq.row)
        return value

    def __set__(self, seq: Any, value: int) -> None:
        getattr(seq.table, self._name)[seq.row] = value
