"""The page tables that all ranks of a replica keep alike."""

import numpy as np

from worker.plan import Chunk


class PageTables:
    """One row of pages for each of `num_slots` slots, kept as `worker.plan.Chunk` says. `rows` is int32."""

    def __init__(self, num_slots: int, pages_per_row: int, page_size: int) -> None:
        self.page_size = page_size
        self.rows = np.zeros((num_slots, pages_per_row), dtype=np.int32)
        self._num_pages = np.zeros(num_slots, dtype=np.int64)

    def update(self, chunks: list[Chunk], slots: np.ndarray, ends: np.ndarray) -> None:
        """Takes what the chunks bring for their rows. `slots` and `ends` are the chunks', the position after the last.

        Raises ValueError if a chunk lies outside its slot's pages, which no right scheduler asks for.
        """
        for chunk in chunks:
            if chunk.pages or chunk.reset:
                self._extend(chunk)
        outside = np.flatnonzero(ends > self._num_pages[slots] * self.page_size)
        if len(outside):
            chunk, pages = chunks[outside[0]], int(self._num_pages[slots[outside[0]]])
            raise ValueError(
                f"slot {chunk.slot}: a chunk to position {ends[outside[0]]} does not fit {pages} pages "
                f"of {self.page_size} tokens"
            )

    def _extend(self, chunk: Chunk) -> None:
        first = 0 if chunk.reset else int(self._num_pages[chunk.slot])
        last = first + len(chunk.pages)
        if last > self.rows.shape[1]:
            raise ValueError(f"slot {chunk.slot}: {last} pages do not fit a table of {self.rows.shape[1]}")
        self.rows[chunk.slot, first:last] = chunk.pages
        self._num_pages[chunk.slot] = last
