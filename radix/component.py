"""Components of a tree: what it has besides the KV of its prefixes, where more is needed to continue one.

Some models need, besides the KV of a prefix, something that belongs to one position: the states after its last token
(`radix.checkpoints`), or the KV of its last tokens in other layers (`radix.windows`). A component has this part for the
end of each node from which the model can go on: a resume point. A point has a part of every component.

    [A|B|C]─ here ──┬─ [D|E]─ here          a prompt A B C D X is continued after C
                    └─ [F] ──┬─ [G]─ here
                             └─ [H]─ here

Each component has a pool of its own, and an order in which its parts are evicted. What a part is, and which goes first,
is all that a component knows; `radix.tree` has the nodes, the points, and what keeps them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from radix.node import PagedNode
from radix.pages import PagePool

P = TypeVar("P")


class Component(ABC, Generic[P]):
    """A component of a tree. `pool`: of what its parts are made. `parts`: by the node at whose end they belong.

    Parts that the sequence which saved them alone has used go first, then those that others went on from, which are at
    most about half; of each the least recently used. Most prompts end in a way that none repeats.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.parts: dict[PagedNode, P] = {}
        # The nodes with parts, each least recently used first.
        self._used_once: dict[PagedNode, None] = {}
        self._used_again: dict[PagedNode, None] = {}

    def eviction_order(self) -> Iterator[PagedNode]:
        """The nodes with parts, those first that would be evicted first if none had a pin or a lease."""
        return chain(self._used_once, self._used_again)

    @abstractmethod
    def check_part(self, num_tokens: int, part: P) -> None:
        """Raises ValueError unless `part` fits the end of `num_tokens` tokens."""

    def save(self, node: PagedNode, part: P) -> None:
        """Takes the part of `node`, which has none."""
        self.parts[node] = part

    def release(self, node: PagedNode) -> None:
        """Gives up the part of `node`, to the pool as far as nothing else needs it."""
        del self.parts[node]
        self._forget_use(node)

    @abstractmethod
    def matched(self, node: PagedNode) -> None:
        """Counts a match that ended at `node`, or a sequence that had a part for it too."""

    def pinned(self, node: PagedNode, pins: int) -> None:
        """`node`, which has a part, was pinned; it has `pins` now."""

    def unpinned(self, node: PagedNode, pins: int) -> None:
        """A pin of `node` has ended; `pins` are left."""

    def children_changed(self, node: PagedNode) -> None:
        """A child of `node`, which has a part, has come or gone."""

    @abstractmethod
    def check(self, held: Iterable[int], pins: Iterable[PagedNode]) -> None:
        """Raises AssertionError, with the fault, unless all of the pool has one owner. `held`: what requests own of it,
        without the tree's. `pins`: the nodes that are pinned."""

    @property
    @abstractmethod
    def _most_used_again(self) -> int:
        """How many of those that others have gone on from are evicted after all others."""

    def _use_again(self, node: PagedNode) -> None:
        """Makes `node` the last used of those that others have gone on from."""
        self._forget_use(node)
        self._used_again[node] = None
        if len(self._used_again) > self._most_used_again:
            oldest = next(iter(self._used_again))
            del self._used_again[oldest]
            self._use_little(oldest)

    def _use_little(self, node: PagedNode) -> None:
        """Makes `node`, which is in no order, the last used of those that no others have gone on from."""
        self._used_once[node] = None

    def _forget_use(self, node: PagedNode) -> None:
        self._used_once.pop(node, None)
        self._used_again.pop(node, None)
