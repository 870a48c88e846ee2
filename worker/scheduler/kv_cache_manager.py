"""The cache of one replica, allocated to sequences: how pages and rows pass between running sequences, the free lists
and the prefix tree.

The cache has groups (`cache_group.py`), as its layout says. The manager asks all of them, and none by its kind. Groups
with pages give a sequence the same number of pages each.

Where a group has a component (`radix.component`), a prefix can be continued from resume points only. Sequences make
them at these positions, all of them page boundaries:

- the last one of a prompt before its last token, which the same prompt, or one that goes on, continues;
- where a prompt parts from one that the tree holds, because a third may begin with the same tokens;
- where a prompt that waits parts from it;
- every `interval` tokens, so that little is lost where others part, and by preemption. Of outputs, too, if a group
  copies its parts;
- if none does: the end of what is computed of a prompt, and the end of an output, also one that is preempted.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from radix.events import Event
from radix.node import NO_PAGES, PagedNode
from radix.tree import Tree
from worker.kv_layout import DEVICE, SLOT, Kind, KVLayout
from worker.messages import ReplicaLoad
from worker.scheduler.cache_group import CacheGroup, FullPages, PagedGroup, PlannedGroup
from worker.scheduler.sequence import IntBuffer, Sequence, pages_for
from worker.scheduler.sequence_table import SequenceTable
from worker.scheduler.state_checkpoints import StateRows
from worker.scheduler.window_pages import WindowPages
from worker.step import NO_COPIES, Copy

KINDS: Mapping[Kind, type[CacheGroup]] = {
    "full": FullPages,
    "latent": FullPages,
    "window": WindowPages,
    "chunk": WindowPages,
    "states": StateRows,
}
# Least part of the interval for which a sequence waits for another: prompts of a chat template all begin alike, and
# should not start one after the other for it.
MIN_PART_OF_INTERVAL = 8


class KVCacheManager:
    """The groups of the cache, and the tree over them. The pages of a sequence are first `num_shared` pages of the
    tree, kept by its lock on `node`, then its own pages.

    | attribute | meaning |
    | --- | --- |
    | `tree` | the prefix tree; its pages are those of the first group |
    | `reuses_prefixes` | whether any prefix can be continued: false where a group has no room for its parts |
    | `plans_points` | whether resume points are planned with the chunks, because parts are copied by steps |
    """

    def __init__(
        self,
        layout: KVLayout,
        table: SequenceTable[Sequence],
        interval: int = 2048,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """`interval`: tokens after which a long sequence can be continued by others, rounded up to whole pages."""
        self._table = table
        self.page_size = layout.page_size
        self.groups = [KINDS[group.kind](group, layout.page_size, table) for group in layout.groups]
        self._paged = [group for group in self.groups if isinstance(group, PagedGroup)]
        self._full = self._paged[0]
        self.pool = self._full.pool
        self._with_parts = [group for group in self.groups if group.component is not None]
        self._planned = [group for group in self.groups if isinstance(group, PlannedGroup)]
        components = [group.component for group in self._with_parts if group.component is not None]
        self.tree = Tree(layout.page_size, self.pool, on_event=on_event, components=components)
        for number, group in enumerate(self.groups):
            group.number, group.tree = number, self.tree
        self.plans_points = bool(self._planned)
        self.reuses_prefixes = all(group.num_units for group in self._with_parts)
        self._interval = pages_for(interval, self.page_size) * self.page_size
        self._no_pages = np.empty((len(self._paged), 0), dtype=np.int32)

    # ------------------------------------------------------------ what there is

    @property
    def num_available(self) -> int:
        """Pages for tokens that are free or can be evicted from the tree."""
        return self._full.num_available

    @property
    def num_growable(self) -> int:
        """Pages that can be allocated to running sequences now, in every group."""
        return min([group.num_available for group in self._paged])

    @property
    def free_share(self) -> float:
        """Fraction of all pages that is free or can be evicted, in the group where it is least."""
        return min([group.num_available / group.num_units for group in self._paged])

    @property
    def num_unreserved(self) -> int:
        """Available pages that no lease keeps for sequences to come."""
        return self.num_available - self.tree.num_reserved

    def has_room_for(self, seq: Sequence, running: np.ndarray) -> bool:
        """Whether `seq`, which has acquired its prefix, may start as far as every group goes, besides pages for all
        tokens. `running`: int64, table rows of the running sequences."""
        return all(group.has_room_for(seq, running) for group in self.groups)

    def cached_tokens(self, seq: Sequence) -> int:
        """Length of the cached prefix of `seq` now, in tokens; at most its `reusable_tokens`."""
        return self.tree.match(seq.cache_keys(seq.reusable_tokens)).num_tokens

    # ------------------------------------------------------------ a sequence gets pages

    def acquire_prefix(self, seq: Sequence) -> None:
        """Locks the cached prefix of `seq` in the tree and gives it these pages."""
        match = self.tree.match(seq.cache_keys(seq.reusable_tokens))
        self.tree.lock(match.node)
        seq.node = match.node
        while len(seq.tables) < len(self._paged):
            seq.tables.append(IntBuffer([]))
        seq.tables[0].write(0, match.pages)
        seq.num_pages = seq.num_shared = len(match.pages)
        seq.num_computed = seq.num_confirmed = match.num_tokens
        if self._with_parts:
            last = (seq.num_known - 1) // self.page_size * self.page_size
            parts = self.tree.num_present(seq.cache_keys(last))
            seq.targets = [position for position in sorted({parts, last}) if position > match.num_tokens]
            self._pin(seq, match.node)
        for group in self.groups:
            group.begin(seq, match.node)

    def allocate(self, seq: Sequence, num_pages: int) -> None:
        """Adds `num_pages` pages to a sequence, at most `num_growable`."""
        first = seq.num_pages
        for group, own in zip(self._paged, seq.tables, strict=True):
            own.write(first, group.allocate(num_pages))
        seq.num_pages = first + num_pages

    def allocate_each(self, rows: np.ndarray) -> None:
        """Adds a page to each sequence. `rows`: int64, their table rows, at most `num_growable`."""
        sequences, num_pages = self._table.sequences_at(rows), self._table.num_pages[rows].tolist()
        for number, group in enumerate(self._paged):
            for seq, index, page in zip(sequences, num_pages, group.allocate(len(rows)).tolist(), strict=True):
                seq.tables[number].write_one(index, page)
        self._table.num_pages[rows] += 1

    def table_changes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Changes of the page tables of sequences since the ranks were last told, all int32. `rows`: int64, their table
        rows. The ranks are told now.

        Returns, per sequence, the number of pages that the ranks keep and the number of pages that follow these; and
        the following pages of all sequences, concatenated, `[groups with pages, sum]`.
        """
        table = self._table
        kept, held = table.num_sent_pages[rows], table.num_pages[rows]
        changed = (kept != held).nonzero()[0]
        if not len(changed):
            return kept, kept - held, self._no_pages
        sequences = table.sequences_at(rows[changed])
        changes = list(zip(sequences, kept[changed].tolist(), held[changed].tolist(), strict=True))
        pages = [
            np.concatenate([seq.tables[number].values[first:last] for seq, first, last in changes])
            for number in range(len(self._paged))
        ]
        table.num_sent_pages[rows] = held
        return kept, held - kept, np.stack(pages)

    # ------------------------------------------------------------ the tree gets pages

    def cache_prefix(self, seq: Sequence) -> PagedNode:
        """Hands what ended steps computed of `seq` to the tree, in whole pages, and locks it there: up to the last
        resume point where the tree has components. Returns the node at whose end it ends.

        If the tree has some of these tokens already, computed by another sequence, `seq` goes on with the tree's pages
        and its own are freed. A step in flight may still read the freed pages. That is safe, because they are written
        again only by later steps.
        """
        for position in self._due(seq):
            self._hand_over(seq, position)
        assert seq.node is not None
        return seq.node

    def give_back(self, rows: np.ndarray) -> None:
        """Frees what sequences no longer need while they run. `rows`: int64, table rows of sequences of which a step
        has ended."""
        for group in self.groups:
            for seq in group.give_back(rows):
                if not any(other.reads_part(seq) for other in self._with_parts):
                    self._unpin(seq)

    def free(self, seq: Sequence, keep: bool) -> None:
        """Frees all that `seq` owns. `keep`: what ended steps computed goes to the tree first."""
        if keep:
            self.cache_prefix(seq)
        for group in self.groups:
            group.free(seq)
        assert seq.node is not None
        self._unpin(seq)
        self.tree.unlock(seq.node)
        seq.node = None
        seq.num_pages = seq.num_sent_pages = seq.num_shared = seq.num_computed = seq.num_confirmed = 0

    # ------------------------------------------------------------ resume points

    def plan_copies(
        self, sequences: list[Sequence], starts: np.ndarray, lengths: np.ndarray, num_decodes: int
    ) -> np.ndarray:
        """`Plan.copies` of a step's chunks, of which the first `num_decodes` are decodes. A position for which a group
        has no room gets no resume point."""
        if not self._planned:
            return NO_COPIES
        ends = starts + lengths
        saving = (ends[:num_decodes] % self._interval == 0).nonzero()[0].tolist()
        copies = list[Copy]()
        for chunk in (*saving, *range(num_decodes, len(sequences))):
            seq, start, end = sequences[chunk], int(starts[chunk]), int(ends[chunk])
            for group in self._planned:
                if (row := group.part_to_read(seq)) is not None:
                    copies.append(Copy(chunk, start, group.number, DEVICE, row, SLOT, seq.slot))
            for position in self._take_targets(seq, start, end, including=True):
                for group in self._planned:
                    if (row := group.allocate_part(seq, position)) is not None:
                        copies.append(Copy(chunk, position, group.number, SLOT, seq.slot, DEVICE, row))
        return np.array(copies, dtype=np.int32) if copies else NO_COPIES

    def next_page(self, seq: Sequence) -> int | None:
        """The first position of the page with which the tree is to get the next tokens of `seq`: that which ended steps
        have not filled; where resume points are planned, the one before the next of them, None if there is none."""
        if not self._planned:
            return seq.num_confirmed // self.page_size * self.page_size
        due = (seq.num_computed // self._interval + 1) * self._interval
        planned = [position for group in self._planned for position in group.planned(seq)[:1]]
        positions = [position for position in (*planned, *seq.targets[:1], due) if position <= seq.num_tokens]
        return min(positions) - self.page_size if positions else None

    def continue_where_parts(self, seq: Sequence, waiting: Sequence) -> None:
        """Lets `waiting`, which waits for the prefix that `seq` computes, go on where their prompts part, if no ended
        step has come so far. Where resume points are planned, it waits for the next of them instead."""
        if self._with_parts and not self._planned:
            position = self._common(seq, waiting)
            if position > seq.num_confirmed and position not in seq.targets:
                insort(seq.targets, position)

    def saves_where_parts(self, seq: Sequence, waiting: Sequence) -> bool:
        """Where resume points are planned: lets `seq`, whose prompt is being computed, make one where that of `waiting`
        parts from it, if no plan has come so far and much of it is not cached. Returns whether it does."""
        position = self._common(seq, waiting)
        is_worth = position - waiting.cached_estimate >= self._interval // MIN_PART_OF_INTERVAL
        if position <= seq.num_computed or not is_worth:
            return False
        if position not in seq.targets:
            insort(seq.targets, position)
        return True

    def _common(self, seq: Sequence, waiting: Sequence) -> int:
        """How many leading tokens both have alike, in whole pages."""
        return seq.common_tokens(waiting, waiting.reusable_tokens) // self.page_size * self.page_size

    def _take_targets(self, seq: Sequence, start: int, end: int, *, including: bool) -> list[int]:
        """Positions after `start` and up to `end` at which `seq` makes resume points, ascending. Takes them off its
        targets. `including`: also at `end`, if it is one of the intervals'."""
        reached = {position for position in seq.targets if position <= end}
        if reached:
            seq.targets = [position for position in seq.targets if position > end]
        first = (start // self._interval + 1) * self._interval
        return sorted(reached.union(range(first, end + including, self._interval)))

    def _due(self, seq: Sequence) -> list[int]:
        """Positions up to which the tree may get the pages of `seq` now, ascending."""
        shared, end = seq.num_shared * self.page_size, seq.num_confirmed // self.page_size * self.page_size
        if not self._with_parts:
            return [end] if end > shared else []
        if self._planned:
            positions = [position for position in self._planned[0].planned(seq) if position <= end]
        else:
            positions = sorted({*self._take_targets(seq, shared, end, including=False), end})
        return [
            position
            for position in positions
            if position > shared and all(group.holds_part(seq, position) for group in self._with_parts)
        ]

    def _hand_over(self, seq: Sequence, position: int) -> None:
        """Hands the pages of `seq` before `position`, some of them its own, to the tree, with a resume point there."""
        assert seq.node is not None
        num_full = position // self.page_size
        keys, pages = seq.cache_keys(position), seq.pages(0, num_full)
        parts = [group.part(seq, position) for group in self._with_parts]
        node, num_present = self.tree.insert(keys, pages, parts)
        self.tree.lock(node)
        self.tree.unlock(seq.node)
        seq.node = node
        twice = slice(seq.num_shared, num_present // self.page_size)
        if twice.stop > twice.start:
            self.pool.free(pages[twice])
            pages[twice] = self.tree.match(keys).pages[twice]
            seq.num_sent_pages = 0
        seq.num_shared = num_full
        for group in self._with_parts:
            group.handed_over(seq, position, node)
        if self._with_parts:
            self._pin(seq, node)

    def _pin(self, seq: Sequence, node: PagedNode) -> None:
        """Pins the point of `node`, at whose end the pages of `seq` are the tree's, instead of another."""
        self.tree.pin(node)
        self._unpin(seq)
        seq.pinned = node

    def _unpin(self, seq: Sequence) -> None:
        if seq.pinned is not None:
            self.tree.unpin(seq.pinned)
            seq.pinned = None

    # ------------------------------------------------------------ load and integrity

    def describe(self, load: ReplicaLoad) -> None:
        """Sets how many tokens the pages hold, and what groups tell."""
        load.kv_tokens_used = (self.pool.num_pages - self.num_available) * self.page_size
        load.kv_tokens_cached = self.tree.num_evictable * self.page_size
        load.kv_tokens_leased = self.tree.num_leased * self.page_size
        load.kv_tokens_evicted = self.tree.num_pages_evicted * self.page_size
        for group in self.groups:
            group.describe(load)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every page and row has exactly one owner. Walks the tree."""
        running = list(running)
        own = np.concatenate([NO_PAGES, *(self._full.held(seq) for seq in running)]).tolist()
        held = [[unit for seq in running for unit in group.held(seq)] for group in self._with_parts]
        self.tree.check_integrity(own, held)
        if not running:
            assert self.tree.num_evictable == self.tree.num_cached, "pages are locked and nothing runs"
            assert not self.tree.pins, "points are pinned and nothing runs"
