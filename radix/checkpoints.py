"""A tree for models with recurrent states: a prefix can be continued where its states were saved.

A checkpoint is a copy of the states after the last token of a node, in a row of a tensor that the tree does not know.
`radix.continuable` says what the tree does with checkpoints. A row is owned by exactly one of: the free list, a
request, the tree.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from radix.continuable import ContinuableTree
from radix.events import Event
from radix.integrity import check_checkpoints
from radix.node import PagedNode
from radix.pages import PagePool
from radix.policies import lru
from radix.tree import Inserted

NO_ROW = -1


class CheckpointTree(ContinuableTree[int]):
    """A `ContinuableTree` of recurrent states: `checkpoints` has the row of each node that has one."""

    def __init__(
        self,
        page_size: int,
        pool: PagePool,
        rows: PagePool,
        policy: Callable[[PagedNode], float] = lru,
        on_event: Callable[[Event], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`rows`: the rows for checkpoints, allocated like pages. Other arguments are those of `Tree`."""
        super().__init__(page_size, pool, policy, on_event, clock)
        self.rows = rows

    def insert(self, tokens: Sequence[int] | np.ndarray, pages: np.ndarray, row: int = NO_ROW) -> Inserted:
        """As `Tree.insert`, with the states after `tokens` in `row`, which the tree takes. If it has a checkpoint there
        already, it keeps that one and frees `row`. Raises ValueError, and nothing changes, without a row or a token."""
        if row == NO_ROW or not len(tokens):
            raise ValueError(f"{len(tokens)} tokens with row {row}: insert what ends at a checkpoint, with its row")
        inserted = super().insert(tokens, pages)
        if inserted.node in self.checkpoints:
            self.free_row(row)
            self._use_again(inserted.node)
        else:
            self._save(inserted.node, row)
        return inserted

    def allocate_row(self) -> int | None:
        """A row, which the caller then owns. Evicts a checkpoint if none is free; None if all are locked, or owned by
        requests."""
        if not self.rows.num_free and not self.evict_checkpoint():
            return None
        allocated = self.rows.allocate(1)
        return None if allocated is None else int(allocated[0])

    def free_row(self, row: int) -> None:
        """Takes back a row. Raises ValueError for one that is free, or that is not there."""
        self.rows.free(np.array([row]))

    def check_integrity(self, held_pages: Iterable[int] = (), held_rows: Iterable[int] = ()) -> None:
        """As `Tree.check_integrity`. `held_rows`: all rows that requests own."""
        super().check_integrity(held_pages)
        check_checkpoints(self, held_rows)

    @property
    def _most_used_again(self) -> int:
        return self.rows.num_pages // 2

    def _release(self, checkpoint: int) -> None:
        self.free_row(checkpoint)
