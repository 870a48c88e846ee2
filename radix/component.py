"""A tree whose prefixes can be continued from some positions only: where it has more than their KV.

Some models need, besides the KV of a prefix, something that belongs to one position: the states after its last token
(`radix.checkpoints`), or the KV of its last tokens in other layers (`radix.windows`). A checkpoint is this for the end
of a node.

    [A|B|C]─ here ──┬─ [D|E]─ here          a prompt A B C D X is continued after C
                    └─ [F] ──┬─ [G]─ here
                             └─ [H]─ here

Pages and checkpoints are two components of one tree, each with its own pool, eviction and events:

- A match ends at the deepest checkpoint of the path, and an insertion at a new one. So every leaf has a checkpoint.
- A lock keeps the pages of the whole path, and the checkpoint of its own node alone.
- A checkpoint is evicted alone, those with a lease of their own last. First go those that only the sequence which saved
  them has used, then those that others went on from, which are at most about half; of each the least recently used. A
  node without a checkpoint stays while it is on the way to a deeper one. Otherwise its pages are freed with it.
- Pages run out: leaves are evicted as in any tree, but whole, with their checkpoints.
"""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from radix.events import Dropped, Event, Saved
from radix.node import TOKEN_BYTES, PagedNode, descend, pack, whole_pages
from radix.pages import PagePool
from radix.snapshot import SnapshotWalk
from radix.tree import Match, Tree

C = TypeVar("C")


class ContinuableTree(Tree, Generic[C]):
    """A `Tree` with checkpoints. Only one thread at a time may use it.

    `checkpoints` has the checkpoint of each node that has one.
    """

    def __init__(
        self,
        page_size: int,
        pool: PagePool,
        policy: Callable[[PagedNode], float],
        on_event: Callable[[Event], None] | None,
        clock: Callable[[], float] | None,
    ) -> None:
        super().__init__(page_size, pool, policy, on_event, clock)
        self.checkpoints: dict[PagedNode, C] = {}
        # The same nodes, each least recently used first: those that only the sequence that saved them has used, and
        # some that others have gone on from. Most prompts end in a way that none repeats.
        self._used_once: dict[PagedNode, None] = {}
        self._used_again: dict[PagedNode, None] = {}
        self.num_checkpoints_evicted = 0  # since the start
        self._tell(Saved(self.root.number))

    def match(self, tokens: Sequence[int] | np.ndarray) -> Match:
        """The longest prefix of `tokens` that can be continued: it ends at a checkpoint, which is `checkpoints[node]`,
        or at the root. Splits nothing, and counts as a use of the path and of this checkpoint."""
        node, inside, _ = descend(self.root, whole_pages(pack(tokens), self._page_bytes), self._page_bytes)
        if inside < len(node.edge):
            assert node.parent is not None
            node = node.parent
        while node.parent is not None and node not in self.checkpoints:
            node = node.parent
        self._use(node)
        if node in self.checkpoints:
            self._matched(node)
        return self._match_to(node)

    def num_present(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Leading tokens of `tokens` whose KV the tree has, in whole pages, whether or not they can be continued."""
        return descend(self.root, whole_pages(pack(tokens), self._page_bytes), self._page_bytes)[2] // TOKEN_BYTES

    def evict_checkpoint(self) -> bool:
        """Frees the first checkpoint of `eviction_order` that is not kept, those with a lease of their own after all
        others, and the pages that nothing leads through any more. Returns whether there was one."""
        evicted: PagedNode | None = None
        for node in self.eviction_order():
            if self._is_kept(node):
                continue
            if not node.own_leases:
                evicted = node
                break
            evicted = evicted or node
        if evicted is None:
            return False
        if evicted.children or evicted.locks:
            self._free_checkpoint(evicted)
            self._tell(Dropped(evicted.number))
        else:
            self._free_leaf(evicted)
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

    @property
    @abstractmethod
    def _most_used_again(self) -> int:
        """How many of those that others have gone on from are evicted after all others."""

    @abstractmethod
    def _release(self, checkpoint: C) -> None:
        """Takes back what a checkpoint holds."""

    def _is_kept(self, node: PagedNode) -> bool:
        """Whether the checkpoint of `node` may not be evicted now."""
        return node.own_locks > 0

    def _save(self, node: PagedNode, checkpoint: C) -> None:
        """Gives `node` a checkpoint, which it has not."""
        self.checkpoints[node] = checkpoint
        self._use_once(node)
        self._tell(Saved(node.number))

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
            if parent is self.root or parent.children or parent.locks or parent in self.checkpoints:
                return np.concatenate(freed)
            node = parent

    def _free_leaf(self, leaf: PagedNode) -> None:
        self._unqueue(leaf)
        self.pool.free(self._take_pages(leaf, len(leaf.pages)))

    def _matched(self, node: PagedNode) -> None:
        """Counts a match that ended at the checkpoint of `node`."""
        self._use_again(node)

    def _use_once(self, node: PagedNode) -> None:
        self._used_once[node] = None

    def _use_again(self, node: PagedNode) -> None:
        """Counts a use of the checkpoint of `node` after the first, that of the sequence which saved it."""
        self._forget_use(node)
        self._used_again[node] = None
        if len(self._used_again) > self._most_used_again:
            oldest = next(iter(self._used_again))
            del self._used_again[oldest]
            self._use_once(oldest)

    def _forget_use(self, node: PagedNode) -> None:
        self._used_once.pop(node, None)
        self._used_again.pop(node, None)

    def _free_checkpoint(self, node: PagedNode) -> None:
        self._release(self.checkpoints.pop(node))
        self._forget_use(node)
        self.num_checkpoints_evicted += 1

    def _tell(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
