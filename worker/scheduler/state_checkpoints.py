"""Checkpoints of recurrent states: which rows sequences own.

A prefix can be continued only where its states were saved (`radix.checkpoints`). A sequence that starts reads the
states of the deepest resume point on its path, and saves its own at others (`KVCacheManager` says where). A position
inside a chunk does not cut it. The plan says which row is read or written after which token (`Plan.copies`).

Steps run in the order of their plans. So a row may be given away as soon as the plan is made that reads it, and while a
step that was dropped is still to write it.
"""

from dataclasses import dataclass, field

from radix.checkpoints import StateComponent
from radix.node import PagedNode
from worker.kv_layout import KVGroup
from worker.messages import ReplicaLoad
from worker.scheduler.cache_group import PlannedGroup
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable


@dataclass(slots=True)
class _SequenceRows:
    """The rows of a running sequence.

    - `read`: the tree's row of states that its first chunk begins with, until that is planned.
    - `saved`: own rows by position, ascending, which plans write and the tree has not got yet.
    """

    read: int | None
    saved: dict[int, int] = field(default_factory=dict)


class StateRows(PlannedGroup):
    """The rows for checkpoints of a model with recurrent states."""

    component: StateComponent

    def __init__(self, group: KVGroup, page_size: int, table: SequenceTable[Sequence]) -> None:
        super().__init__(group, page_size, table)
        self.component = StateComponent(self.pool)
        self._rows: dict[Sequence, _SequenceRows] = {}  # of running sequences

    def begin(self, seq: Sequence, node: PagedNode) -> None:
        self._rows[seq] = _SequenceRows(self.component.parts.get(node))

    def free(self, seq: Sequence) -> None:
        for row in self._rows.pop(seq).saved.values():
            self.pool.free_one(row)

    def held(self, seq: Sequence) -> list[int]:
        return [*self._rows[seq].saved.values()]

    def describe(self, load: ReplicaLoad) -> None:
        """Sets the checkpoints that there may be, that the tree has, and that it has evicted since the start."""
        load.checkpoints_total = self.num_units
        load.checkpoints = len(self.component.parts)
        load.checkpoints_evicted = self.tree.num_points_evicted

    def reads_part(self, seq: Sequence) -> bool:
        return self._rows[seq].read is not None

    def holds_part(self, seq: Sequence, position: int) -> bool:
        return position in self._rows[seq].saved

    def part(self, seq: Sequence, position: int) -> int:
        return self._rows[seq].saved[position]

    def handed_over(self, seq: Sequence, position: int, node: PagedNode) -> None:
        row = self._rows[seq].saved.pop(position)
        if self.component.parts[node] != row:
            self.pool.free_one(row)

    def part_to_read(self, seq: Sequence) -> int | None:
        own = self._rows[seq]
        read, own.read = own.read, None
        return read

    def allocate_part(self, seq: Sequence, position: int) -> int | None:
        allocated = self.tree.allocate_part(self.component, 1)
        if allocated is None:
            return None
        row = self._rows[seq].saved[position] = int(allocated[0])
        return row

    def planned(self, seq: Sequence) -> list[int]:
        return [*self._rows[seq].saved]
