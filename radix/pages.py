"""The pages of one replica's KV cache, and the list of those that are free."""

import numpy as np


class PagePool:
    """Allocates pages 0 .. num_pages-1; a page has the KV of `page_size` consecutive tokens.

    Every page is owned by exactly one of: this free list, a running request, the tree. The pool knows only the free
    pages; `radix.integrity.check` checks the rest.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Raises ValueError for a negative number of pages or a page size outside 1 .. 64."""
        if num_pages < 0:
            raise ValueError(f"a pool cannot have {num_pages} pages")
        if not 1 <= page_size <= 64:
            raise ValueError(f"page_size must be 1 to 64 tokens, not {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._stack = np.arange(
            num_pages - 1, -1, -1, dtype=np.int32
        )  # free are the first `num_free` entries, taken from the end
        self._num_free = num_pages
        self._is_free = np.ones(num_pages, dtype=bool)

    @property
    def num_free(self) -> int:
        """Number of pages that `allocate` could return now."""
        return self._num_free

    def free_pages(self) -> np.ndarray:
        """The free pages, int32, in no useful order (a copy)."""
        return self._stack[: self._num_free].copy()

    def allocate(self, n: int) -> np.ndarray | None:
        """Returns `n` pages, int32 [n], which the caller then owns; None, and nothing changes, if fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self._num_free:
            return None
        pages = self._stack[self._num_free - n : self._num_free][::-1].copy()
        self._num_free -= n
        self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Takes back `pages` (integers [n]). Raises ValueError, and nothing changes, for a page that is free already,
        is named twice, or is not in this pool."""
        pages = np.asarray(pages)
        if pages.size == 0:
            return
        if pages.ndim != 1 or pages.dtype.kind not in "iu":
            raise ValueError(f"pages must be integers of one dimension, not {pages.dtype} {pages.shape}")
        if pages.min() < 0 or pages.max() >= self.num_pages:
            foreign = pages[(pages < 0) | (pages >= self.num_pages)]
            raise ValueError(f"pages {foreign[:8].tolist()} are not of this pool of {self.num_pages}")
        if self._is_free[pages].any():
            raise ValueError(f"pages {pages[self._is_free[pages]][:8].tolist()} are free already")
        if len(np.unique(pages)) != len(pages):
            raise ValueError(f"a page is named twice among the {len(pages)} to free")
        self._is_free[pages] = True
        self._stack[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def free_one(self, page: int) -> None:
        """As `free`, of one page."""
        self.free(np.array([page]))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the free list and the marks of free pages agree."""
        listed = self._stack[: self._num_free]
        if len(np.unique(listed)) != self._num_free:
            raise AssertionError("the free list names a page twice")
        if not np.array_equal(np.sort(listed), np.flatnonzero(self._is_free)):
            raise AssertionError(f"{self._num_free} pages are listed as free, {int(self._is_free.sum())} are marked so")
