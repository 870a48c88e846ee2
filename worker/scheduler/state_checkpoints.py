"""Checkpoints of recurrent states: where sequences save them, and how the tree gets them.

A prefix can be continued only from a checkpoint (`radix.checkpoints`). A sequence that starts reads the states of the
deepest one on its path, and saves its own at these positions, all of them page boundaries:

- the last one of its prompt, which the same prompt, or one that goes on, continues;
- where its prompt parts from one that the tree holds, because a third may begin with the same tokens;
- where a prompt that waits parts from it, if much of both is the same;
- every `interval` tokens of a long prompt or output, so that little is lost where others part, and by preemption.

A position inside a chunk does not cut it. The plan says which row is read or written after which token
(`Plan.checkpoints`). Steps run in the order of their plans. So a row may be given away as soon as the plan is made that
reads it, and while a step that was dropped is still to write it.
"""

from bisect import insort
from collections.abc import Iterable
from functools import partial

import numpy as np

from radix.checkpoints import NO_ROW, CheckpointTree
from radix.node import PagedNode
from worker.messages import ReplicaLoad
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.sequence import Sequence, pages_for
from worker.scheduler.sequence_checkpoints import SequenceCheckpoints
from worker.scheduler.sequence_table import SequenceTable
from worker.step import NO_CHECKPOINTS

# Least part of the interval for which a sequence waits for another: prompts of a chat template all begin alike, and
# should not start one after the other for it.
LEAST_PART = 8


class CheckpointedKVCache(KVCacheManager):
    """The KV pages of a replica whose model has recurrent states, and the rows of its checkpoints."""

    def __init__(self, tree: CheckpointTree, table: SequenceTable[Sequence], interval: int) -> None:
        """`interval`: tokens between two checkpoints of a long sequence, rounded up to whole pages."""
        super().__init__(tree, table)
        self._checkpoints = tree
        self._interval = pages_for(interval, tree.page_size) * tree.page_size

    def acquire_prefix(self, seq: Sequence) -> None:
        """As `KVCacheManager.acquire_prefix`, up to the deepest checkpoint."""
        super().acquire_prefix(seq)
        assert seq.node is not None
        last = (seq.num_known - 1) // self.page_size * self.page_size
        parts = self._checkpoints.num_present(seq.cache_keys(last))
        targets = sorted(position for position in {parts, last} if position > seq.num_computed)
        seq.checkpoints = SequenceCheckpoints(self._checkpoints.checkpoints.get(seq.node, NO_ROW), targets)

    def cache_prefix(self, seq: Sequence) -> PagedNode:
        """Hands the pages of `seq` to the tree, up to the last checkpoint that an ended step has saved, and locks them
        there. Otherwise as `KVCacheManager.cache_prefix`."""
        assert seq.node is not None and seq.checkpoints is not None
        saved = seq.checkpoints.saved
        while saved and saved[0][0] <= seq.num_confirmed:
            position, row = saved.pop(0)
            self._hand_over(seq, position // self.page_size, partial(self._checkpoints.insert, row=row))
        return seq.node

    def free(self, seq: Sequence, keep: bool) -> None:
        """As `KVCacheManager.free`, with the rows of `seq`."""
        super().free(seq, keep)
        assert seq.checkpoints is not None
        for _, row in seq.checkpoints.saved:
            self._checkpoints.free_row(row)
        seq.checkpoints = None

    def save_where_parts(self, seq: Sequence, waiting: Sequence) -> bool:
        """Lets `seq`, whose prompt is being computed, save its states where that of `waiting` parts from it, if no plan
        has come so far and much of it is not cached. Returns whether it does."""
        own, common = seq.checkpoints, seq.common_tokens(waiting, waiting.reusable_tokens)
        position = common // self.page_size * self.page_size
        is_worth = position - waiting.cached_estimate >= self._interval // LEAST_PART
        if own is None or position <= seq.num_computed or not is_worth:
            return False
        if position not in own.targets:
            insort(own.targets, position)
        return True

    def plan_copies(
        self, sequences: list[Sequence], starts: np.ndarray, lengths: np.ndarray, num_decodes: int
    ) -> np.ndarray:
        """`Plan.checkpoints` of a step's chunks, of which the first `num_decodes` are decodes. A position for which
        there is no row gets no checkpoint."""
        ends = starts + lengths
        saving = (ends[:num_decodes] % self._interval == 0).nonzero()[0].tolist()
        copies = list[tuple[int, int, int]]()
        for chunk in (*saving, *range(num_decodes, len(sequences))):
            seq, start, end = sequences[chunk], int(starts[chunk]), int(ends[chunk])
            own = seq.checkpoints
            assert own is not None
            if own.read != NO_ROW:
                copies.append((chunk, start, own.read))
                own.read = NO_ROW
            for position in self._positions(own, start, end):
                row = self._checkpoints.allocate_row()
                if row is not None:
                    copies.append((chunk, position, row))
                    own.saved.append((position, row))
        return np.array(copies, dtype=np.int32) if copies else NO_CHECKPOINTS

    def next_checkpoint(self, seq: Sequence) -> int | None:
        """The first position beyond the tokens of ended steps at which `seq` saves its states, as far as that is known;
        None if there is none."""
        own = seq.checkpoints
        assert own is not None
        due = (seq.num_computed // self._interval + 1) * self._interval
        positions = [*(position for position, _ in own.saved[:1]), *own.targets[:1], due]
        return min((position for position in positions if position <= seq.num_tokens), default=None)

    def describe(self, load: ReplicaLoad) -> None:
        """As `KVCacheManager.describe`, with the checkpoints that there may be, that the tree has, and that it has
        evicted since the start."""
        super().describe(load)
        load.checkpoints_total = self._checkpoints.rows.num_pages
        load.checkpoints = len(self._checkpoints.checkpoints)
        load.checkpoints_evicted = self._checkpoints.num_checkpoints_evicted

    def _positions(self, own: SequenceCheckpoints, start: int, end: int) -> list[int]:
        """Positions after `start` and up to `end` at which states are to be saved, ascending. Takes them off the
        targets."""
        reached = {position for position in own.targets if position <= end}
        own.targets = [position for position in own.targets if position > end]
        first = (start // self._interval + 1) * self._interval
        return sorted(reached.union(range(first, end + 1, self._interval)))

    def _check_tree(self, running: Iterable[Sequence], own_pages: list[int]) -> None:
        rows = [row for seq in running if seq.checkpoints is not None for _, row in seq.checkpoints.saved]
        self._checkpoints.check_integrity(own_pages, rows)
