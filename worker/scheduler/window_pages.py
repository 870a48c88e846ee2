"""Pages of windows: which of them sequences hold.

Layers with a window have pages of their own (`radix.windows`). A sequence gets them together with those of the other
layers. When a step has ended, it gives back those that lie wholly before the window of its next token, or that of its
last page boundary, where the tree may get it. A prefix can be continued only where its window is whole.

Steps run in the order of their plans. So a page may have its next owner while a step that reads it is in flight.
"""

import numpy as np

from radix.node import NO_PAGES, PagedNode
from radix.windows import WindowComponent
from worker.kv_layout import KVGroup
from worker.messages import ReplicaLoad
from worker.scheduler.cache_group import PagedGroup
from worker.scheduler.sequence import Sequence, pages_for
from worker.scheduler.sequence_table import SequenceTable


class WindowPages(PagedGroup):
    """The pages of layers with a window, or with chunks."""

    component: WindowComponent

    def __init__(self, group: KVGroup, page_size: int, table: SequenceTable[Sequence]) -> None:
        super().__init__(group, page_size, table)
        self.component = WindowComponent(self.pool, group.window_tokens, in_chunks=group.kind == "chunk")
        # Most pages that a sequence needs for long: those of a window that begins anywhere in a page, and the next.
        self._most = pages_for(group.window_tokens, page_size) + 2

    @property
    def num_available(self) -> int:
        return self.pool.num_free + self.component.num_evictable

    def allocate(self, num_pages: int) -> np.ndarray:
        pages = self.tree.allocate_part(self.component, num_pages)
        assert pages is not None, "more pages were promised than there are"
        return pages

    def has_room_for(self, seq: Sequence, running: np.ndarray) -> bool:
        """Whether the pages that it needs for long are there next to those that running sequences are to get, each up
        to its window."""
        if not len(running):
            return True
        table = self._table
        rows = np.append(running, seq.row)
        tokens = np.maximum(table.expected_tokens[rows], table.num_tokens[rows] + 1)
        needed = -(-(np.minimum(tokens, table.token_limit[rows]) - 1) // self.page_size) - table.num_shared[rows]
        held = table.num_pages[rows] - np.maximum(table.first_window_page[rows], table.num_shared[rows])
        return int(np.maximum(np.minimum(needed, self._most) - held, 0).sum()) <= self.num_available

    def begin(self, seq: Sequence, node: PagedNode) -> None:
        first = seq.first_window_page = self.component.first_page(seq.num_computed)
        seq.tables[self.number].write(0, np.zeros(seq.num_pages, dtype=np.int32))
        seq.tables[self.number].write(first, self.component.parts.get(node, NO_PAGES))

    def give_back(self, rows: np.ndarray) -> list[Sequence]:
        """The pages before the windows of sequences' next tokens."""
        table, size = self._table, self.page_size
        ends = table.num_confirmed[rows] // size * size
        firsts = self.component.first_pages(ends)
        slid = (firsts > table.first_window_page[rows]).nonzero()[0]
        if not len(slid):
            return []
        sequences, freed = table.sequences_at(rows[slid]), []
        for seq, first in zip(sequences, firsts[slid].tolist(), strict=True):
            freed.append(self._own(seq, seq.first_window_page, first))
            seq.first_window_page = first
        self.pool.free(np.concatenate(freed))
        return sequences

    def free(self, seq: Sequence) -> None:
        self.pool.free(self.held(seq))
        seq.first_window_page = 0

    def held(self, seq: Sequence) -> np.ndarray:
        return self._own(seq, seq.first_window_page, seq.num_pages)

    def describe(self, load: ReplicaLoad) -> None:
        """Sets the tokens that window pages hold."""
        load.window_tokens_total = self.num_units * self.page_size
        load.window_tokens_used = load.window_tokens_total - self.num_available * self.page_size

    def reads_part(self, seq: Sequence) -> bool:
        return seq.first_window_page < seq.num_shared

    def holds_part(self, seq: Sequence, position: int) -> bool:
        return self.component.first_page(position) >= seq.first_window_page

    def part(self, seq: Sequence, position: int) -> np.ndarray:
        """The window before `position`. A view of the sequence's pages."""
        first = self.component.first_page(position)
        return seq.tables[self.number].values[first : position // self.page_size]

    def handed_over(self, seq: Sequence, position: int, node: PagedNode) -> None:
        """Replaces the window of `seq` by that which the tree has there, if it is another."""
        window, cached = self.part(seq, position), self.component.parts[node]
        if not np.array_equal(window, cached):
            self.pool.free(window[~self.component.owns(window)])
            window[:] = cached
            seq.num_sent_pages = 0

    def _own(self, seq: Sequence, first: int, last: int) -> np.ndarray:
        """Own pages among those number `first` to `last - 1`: the others are the tree's."""
        pages = seq.tables[self.number].values[first:last]
        return pages[~self.component.owns(pages)]
