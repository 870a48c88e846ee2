"""Page tables of the running sequences. Every rank of a replica has the same."""

import numpy as np

from worker.step import Plan


class PageTable:
    """The page tables of each slot, one for each group with pages, updated by plans as `worker.step.Chunk` says.
    `rows`: int32 `[num_groups, num_slots, pages_per_row]`."""

    def __init__(self, num_slots: int, pages_per_row: int, page_size: int, num_groups: int = 1) -> None:
        self.page_size = page_size
        self.rows = np.zeros((num_groups, num_slots, pages_per_row), dtype=np.int32)
        self._num_pages = np.zeros(num_slots, dtype=np.int32)

    def update(self, plan: Plan) -> None:
        """Applies a plan's new pages.

        Raises ValueError if a chunk lies outside its slot's pages, which only a bug in the scheduler causes.
        """
        if plan.pages.size:
            self._extend(plan)
        ends = plan.starts + plan.lengths
        outside = ends > self._num_pages[plan.slots] * self.page_size
        if np.count_nonzero(outside):
            first = int(np.flatnonzero(outside)[0])
            slot = int(plan.slots[first])
            raise ValueError(
                f"slot {slot}: a chunk to position {ends[first]} does not fit {self._num_pages[slot]} pages "
                f"of {self.page_size} tokens"
            )

    def _extend(self, plan: Plan) -> None:
        changed = plan.num_pages.nonzero()[0]
        slots, counts = plan.slots[changed], plan.num_pages[changed]
        ends = plan.num_kept_pages[changed] + counts
        if (ends > self.rows.shape[2]).any():
            slot, end = max(zip(slots.tolist(), ends.tolist(), strict=True), key=lambda pair: pair[1])
            raise ValueError(f"slot {slot}: {end} pages do not fit a table of {self.rows.shape[2]}")
        columns = np.arange(plan.pages.shape[1]) + np.repeat(ends - np.cumsum(counts), counts)
        self.rows[:, np.repeat(slots, counts), columns] = plan.pages
        self._num_pages[slots] = ends
