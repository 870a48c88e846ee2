"""A tree whose prefixes can be continued from some positions only: those of its checkpoints.

Models with recurrent states need, besides the KV of a prefix, the states after its last token. A checkpoint is a copy
of these, in a row of a tensor that the tree does not know. It belongs to a node, and has the states at the node's end.

    [A|B|C]─ row 3 ──┬─ [D|E]─ row 0        a prompt A B C D X is continued after C, from row 3
                     └─ [F] ──┬─ [G]─ row 7
                              └─ [H]─ row 2

Pages and rows are two components of one tree, each with its own pool, eviction and events:

- A match ends at the deepest checkpoint of the path, and an insertion at a new one. So every leaf has a checkpoint.
- A lock keeps the pages of the whole path, and the checkpoint of its own node alone.
- Rows run out: a checkpoint without a lock is evicted, those with a lease of their own last. First go those that only
  the sequence which saved them has used, then those that others went on from, which hold at most half of the rows; of
  each the least recently used. A node without a checkpoint stays while it is on the way to a deeper one. Otherwise its
  pages are freed with it.
- Pages run out: leaves are evicted as in any tree, but whole, with their checkpoints.

A row is owned by exactly one of: the free list, a request, the tree.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from radix.events import Dropped, Event, Saved
from radix.integrity import check_checkpoints
from radix.node import TOKEN_BYTES, PagedNode, descend, pack, whole_pages
from radix.pages import PagePool
from radix.policies import lru
from radix.snapshot import SnapshotWalk
from radix.tree import Inserted, Match, Tree

NO_ROW = -1


class CheckpointTree(Tree):
    """A `Tree` with checkpoints. Only one thread at a time may use it.

    `checkpoints` has the row of each node that has one.
    """

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
        self.checkpoints: dict[PagedNode, int] = {}
        # The same nodes, each least recently used first: those that only the sequence that saved them has used, and at
        # most half of the rows that others have gone on from. Most prompts end in a way that none repeats.
        self._used_once: dict[PagedNode, None] = {}
        self._used_again: dict[PagedNode, None] = {}
        self.num_checkpoints_evicted = 0  # since the start
        self._tell(Saved(self.root.number))

    def match(self, tokens: Sequence[int] | np.ndarray) -> Match:
        """The longest prefix of `tokens` that can be continued: it ends at a checkpoint, the row of which is
        `checkpoints[node]`, or at the root. Splits nothing, and counts as a use of the path and of this checkpoint."""
        node, inside, _ = descend(self.root, whole_pages(pack(tokens), self._page_bytes), self._page_bytes)
        if inside < len(node.edge):
            assert node.parent is not None
            node = node.parent
        while node.parent is not None and node not in self.checkpoints:
            node = node.parent
        self._use(node)
        if node in self.checkpoints:
            self._use_again(node)
        return self._match_to(node)

    def num_present(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Leading tokens of `tokens` whose KV the tree has, in whole pages, whether or not they can be continued."""
        return descend(self.root, whole_pages(pack(tokens), self._page_bytes), self._page_bytes)[2] // TOKEN_BYTES

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
            self.checkpoints[inserted.node] = row
            self._used_once[inserted.node] = None
            self._tell(Saved(inserted.node.number))
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

    def evict_checkpoint(self) -> bool:
        """Frees the row of the first checkpoint of `eviction_order` without a lock, those with a lease of their own
        after all others, and the pages that nothing leads through any more. Returns whether there was one."""
        evicted: PagedNode | None = None
        for node in self.eviction_order():
            if node.own_locks:
                continue
            if not node.own_leases:
                evicted = node
                break
            evicted = evicted or node
        if evicted is None:
            return False
        if evicted.children:
            self._free_checkpoint(evicted)
            self._tell(Dropped(evicted.number))
        else:
            self._unqueue(evicted)
            self.pool.free(self._take_pages(evicted, len(evicted.pages)))
        return True

    def eviction_order(self) -> Iterator[PagedNode]:
        """The nodes with checkpoints, those first that would be evicted first if none had a lock or a lease."""
        return itertools.chain(self._used_once, self._used_again)

    def snapshot(self) -> list[Event]:
        """As `Tree.snapshot`, with the checkpoints."""
        saved = [Saved(node.number) for node in (self.root, *self.checkpoints)]
        return super().snapshot() + saved

    def snapshot_walk(self) -> SnapshotWalk:
        """As `Tree.snapshot_walk`, with the checkpoints."""
        return SnapshotWalk(self.root, self.checkpoints)

    def check_integrity(self, held_pages: Iterable[int] = (), held_rows: Iterable[int] = ()) -> None:
        """As `Tree.check_integrity`. `held_rows`: all rows that requests own."""
        super().check_integrity(held_pages)
        check_checkpoints(self, held_rows)

    def _take_pages(self, leaf: PagedNode, most: int) -> np.ndarray:
        """Removes a leaf whole, and the nodes above it that were there for its checkpoint alone. Returns their
        pages, which may be more than `most`."""
        freed = []
        node = leaf
        while True:
            parent = node.parent
            assert parent is not None
            if node in self.checkpoints:
                self._free_checkpoint(node)
            self._unqueue(node)
            self._remove(node)
            freed.append(node.pages)
            if parent is self.root or parent.children or parent in self.checkpoints:
                return np.concatenate(freed)
            node = parent

    def _use_again(self, node: PagedNode) -> None:
        """Counts a use of the checkpoint of `node` after the first, that of the sequence which saved it."""
        self._used_once.pop(node, None)
        self._used_again.pop(node, None)
        self._used_again[node] = None
        if len(self._used_again) > self.rows.num_pages // 2:
            oldest = next(iter(self._used_again))
            del self._used_again[oldest]
            self._used_once[oldest] = None

    def _free_checkpoint(self, node: PagedNode) -> None:
        self.free_row(self.checkpoints.pop(node))
        self._used_once.pop(node, None)
        self._used_again.pop(node, None)
        self.num_checkpoints_evicted += 1

    def _tell(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
