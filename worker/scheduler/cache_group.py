"""A group of the cache's layout, as the scheduler allocates it to sequences.

| class | allocates | when | gives back | its part of a resume point |
| --- | --- | --- | --- | --- |
| `FullPages` | pages | with the tokens | at the end | none: the tree's nodes have its pages |
| `WindowPages` (`window_pages.py`) | pages | with the tokens | what lies before the window | the pages of the window |
| `StateRows` (`state_checkpoints.py`) | rows | with the chunk that writes them | at the end | the row |

A kind of its own is one class here, and a `radix.component.Component` if prefixes cannot be continued without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np

from radix.component import Component
from radix.node import NO_PAGES, PagedNode
from radix.pages import PagePool
from radix.tree import Tree
from worker.kv_layout import KVGroup
from worker.messages import ReplicaLoad
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable


class CacheGroup(ABC):
    """A group of the layout, of this `number`. `component`: its part of the tree's resume points, None if it has
    none."""

    number = 0
    component: Component[Any] | None = None

    def __init__(self, group: KVGroup, page_size: int, table: SequenceTable[Sequence]) -> None:
        self.num_units = group.num_units
        self.page_size = page_size
        self.pool = PagePool(group.num_units, page_size)
        self._table = table
        self.tree: Tree  # set before anything is allocated

    @abstractmethod
    def begin(self, seq: Sequence, node: PagedNode) -> None:
        """Gives `seq`, which has acquired the pages up to `node` and counts them, what it goes on with from there."""

    @abstractmethod
    def free(self, seq: Sequence) -> None:
        """Frees what `seq` owns."""

    @abstractmethod
    def held(self, seq: Sequence) -> Iterable[int]:
        """The units that `seq` owns, without the tree's."""

    def has_room_for(self, seq: Sequence, running: np.ndarray) -> bool:
        """Whether `seq`, which has acquired its prefix, may start next to the running sequences, int64 table rows,
        as far as this group goes. Pages for all tokens are forecast by `Admission`."""
        return True

    def give_back(self, rows: np.ndarray) -> list[Sequence]:
        """Frees what sequences, int64 table rows, no longer need while they run. A step of each has ended. Returns the
        sequences that gave something back."""
        return []

    def describe(self, load: ReplicaLoad) -> None:  # noqa: B027 - optional
        """Sets what this group alone tells."""

    # ------------------------------------------------------------ with a component: its part of resume points

    def reads_part(self, seq: Sequence) -> bool:
        """Whether `seq` still reads the part with which it began, or that it handed over last."""
        return False

    def holds_part(self, seq: Sequence, position: int) -> bool:
        """Whether `seq` has the part for the resume point at `position`, in tokens."""
        return True

    def part(self, seq: Sequence, position: int) -> Any:
        """The part of `seq` for the resume point at `position`."""
        raise NotImplementedError

    def handed_over(self, seq: Sequence, position: int, node: PagedNode) -> None:  # noqa: B027 - optional
        """The tree has a resume point for `position` at `node` now: it has taken the part of `seq`, or had one
        already, with which `seq` goes on."""


class PlannedGroup(CacheGroup):
    """A group whose parts are copied by the steps that compute them, so that they are planned with the chunks."""

    @abstractmethod
    def part_to_read(self, seq: Sequence) -> int | None:
        """The part with which the next chunk of `seq` begins, once; None for the slot's own states, or none."""

    @abstractmethod
    def allocate_part(self, seq: Sequence, position: int) -> int | None:
        """A part that the chunk up to or beyond `position` writes, owned by `seq`. None if there is no room."""

    @abstractmethod
    def planned(self, seq: Sequence) -> list[int]:
        """Positions of the parts that `seq` owns, written or on their way; ascending."""


class PagedGroup(CacheGroup):
    """A group with pages, which a sequence gets with its tokens. Its tables in `Sequence.tables` have its number, as
    groups with pages come first."""

    @property
    @abstractmethod
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""

    @abstractmethod
    def allocate(self, num_pages: int) -> np.ndarray:
        """Returns pages, at most `num_available`, int32."""


class FullPages(PagedGroup):
    """Pages of the layers that see all tokens. The tree's nodes have them."""

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.tree.num_evictable

    def allocate(self, num_pages: int) -> np.ndarray:
        if num_pages > self.pool.num_free:
            self.tree.evict(num_pages - self.pool.num_free)
        pages = self.pool.allocate(num_pages)
        assert pages is not None, "more pages were promised than there are"
        return pages

    def begin(self, seq: Sequence, node: PagedNode) -> None:
        """The pages of the path are those of the match, which `KVCacheManager` has written."""

    def free(self, seq: Sequence) -> None:
        self.pool.free(seq.own_pages)

    def held(self, seq: Sequence) -> np.ndarray:
        return seq.own_pages if seq.num_pages else NO_PAGES
