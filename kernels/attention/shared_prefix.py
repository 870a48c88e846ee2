"""Search for groups of decoding sequences that begin with the same pages. Attention may read these once for a group.

The search reads the page tables on the host. All ranks of a replica have the same tables, so they find the same groups.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kernels.attention.interface import AttentionBatch, AttentionShape, SharedPrefixes

# Fixed cost of reading prefixes once, a layer: the bytes that a GPU reads in that time. Measured on an H200, which
# reads 4.28 TB/s: 117 MB saved for 8 sequences gain nothing, since a cache serves a part of separate reads; 134 MB
# saved for 64 sequences in pairs gain 4 us.
_STARTS_BYTES = 100e6
# Depth to which prefixes of prefixes are searched: system prompt, tenant, session and turn, for example.
_MOST_LEVELS = 4
# Steps of the same sequences after which groups are searched again.
_MOST_STEPS = 32
# Pages of two tables that one operation compares.
_BLOCK_PAGES = 64
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class _Level:
    """The groups at one depth. A group is a part of its parent, a group of the level before, and shares at least one
    more page than the parent does.

    | field | meaning |
    | --- | --- |
    | `chunks`, `ends` | group g is `chunks[ends[g] : ends[g + 1]]` |
    | `parents` | index of each group's parent |
    | `num_pages` | pages that the chunks of each group share |
    | `worth` | bytes a layer that reading those pages once saves, less the cost of the merge |
    """

    chunks: np.ndarray
    ends: np.ndarray
    parents: np.ndarray
    num_pages: np.ndarray
    worth: np.ndarray

    def spread(self, of_groups: np.ndarray) -> np.ndarray:
        """Repeats the value of each group for each of its chunks."""
        return np.repeat(of_groups, self.ends[1:] - self.ends[:-1])


class SharedPrefixFinder:
    """Finds the groups that save most. A sequence is in one group at most, so a prefix that several groups share is
    read by each of them.

    The search is logarithmic in the length of prefixes. It relies on a property of tables that come from a radix tree:
    two tables with the same page in the same place are the same up to there.

    The groups of the last batch are kept while the same sequences decode on, up to `_MOST_STEPS` steps. Then they are
    searched again, since the tree may have replaced pages of a sequence by equal ones that other sequences have.
    """

    def __init__(self, page_size: int, shape: AttentionShape, itemsize: int) -> None:
        """`itemsize`: bytes of one number in the pages."""
        self.page_size = page_size
        self._page_bytes = 2 * shape.num_kv_heads * page_size * shape.head_dim * itemsize
        # Cost of merging one sequence's part of the result: it is written once and read once.
        self._part_bytes = 2 * shape.num_heads * shape.head_dim * _FLOAT32_BYTES
        nothing = np.zeros(0, dtype=np.int32)
        self._rows, self._starts, self._first_pages = nothing, nothing, nothing
        self._found: SharedPrefixes | None = None
        self._steps = 0
        # Chunk, place and page of the last page that each member of a group shares.
        self._last_pages = nothing, nothing, nothing

    def find(self, batch: AttentionBatch) -> SharedPrefixes | None:
        """The groups of a batch of chunks of one token; None if reading prefixes once costs more than it saves. The
        result is the same object as in the last call if the groups and the pages that they share are the same."""
        first_pages = batch.tables[batch.rows, 0]
        if not self._is_next(batch, first_pages):
            self._found, self._steps = self._find(batch, first_pages), 0
            if self._found is not None:
                members, columns = self._found.members, self._found.pages_of(len(batch.rows)) - 1
                columns = columns[members]
                self._last_pages = members, columns, batch.tables[batch.rows[members], columns]
        self._steps += 1
        self._rows, self._starts, self._first_pages = batch.rows.copy(), batch.starts.copy(), first_pages
        return self._found

    def _is_next(self, batch: AttentionBatch, first_pages: np.ndarray) -> bool:
        """Whether this batch is the last one a token later, with tables that still agree, and `_MOST_STEPS` are not
        over."""
        if (
            self._steps >= _MOST_STEPS
            or len(self._rows) != len(batch.rows)
            or not (
                (self._rows == batch.rows).all()
                and (self._first_pages == first_pages).all()
                and (self._starts + 1 == batch.starts).all()
            )
        ):
            return False
        members, columns, pages = self._last_pages
        return self._found is None or bool((batch.tables[batch.rows[members], columns] == pages).all())

    def _find(self, batch: AttentionBatch, first_pages: np.ndarray) -> SharedPrefixes | None:
        # The page that the new token goes to is the sequence's own.
        whole = (batch.starts // self.page_size).astype(np.int64)
        pages = np.where(whole > 0, first_pages, -1)
        chunks, ends, parents = _alike(np.arange(len(pages)), pages, np.zeros(len(pages), dtype=np.int64))
        levels: list[_Level] = []
        while len(chunks) and len(levels) < _MOST_LEVELS:
            sizes = ends[1:] - ends[:-1]
            num_pages = _common(batch, whole, chunks, ends)
            worth = (sizes - 1) * num_pages * self._page_bytes - sizes * self._part_bytes
            level = _Level(chunks, ends, parents, num_pages, worth)
            levels.append(level)
            depths = level.spread(num_pages)
            inside = depths < whole[chunks]
            pages = np.where(inside, batch.tables[batch.rows[chunks], depths * inside], -1)
            chunks, ends, parents = _alike(chunks, pages, level.spread(np.arange(len(sizes))))
        return _best(levels)


def _alike(chunks: np.ndarray, pages: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divides groups into smaller ones of two or more chunks that have the same page; a page of -1 equals no other.

    Chunk `chunks[i]` is in group `groups[i]` and has page `pages[i]`. Returns the chunks of the new groups, 0 and the
    end of each new group among these, and the group that each is a part of.
    """
    keys = (groups << 32) + pages
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    is_first = np.ones(len(order) + 1, dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:-1])
    # A chunk is alone with its page if it and the chunk after it are both the first with their pages.
    is_wanted = ~(is_first[:-1] & is_first[1:])
    is_wanted &= pages[order] >= 0
    order, starts = order[is_wanted], is_first[:-1][is_wanted].nonzero()[0]
    return chunks[order], np.append(starts, len(order)), groups[order[starts]]


def _common(batch: AttentionBatch, whole: np.ndarray, chunks: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Number of pages with which all tables of a group begin, at least one: int64 `[num_groups]`."""
    # Every chunk is compared with the first of its group.
    is_other = np.ones(len(chunks), dtype=bool)
    is_other[ends[:-1]] = False
    leaders = np.repeat(chunks[ends[:-1]], ends[1:] - ends[:-1] - 1)
    others = chunks[is_other]
    width = batch.tables.shape[1]
    mine, theirs = batch.rows[others].astype(np.int64), batch.rows[leaders].astype(np.int64)
    limits = np.minimum(whole[others], whole[leaders])
    # 1. Bisection finds the block in which two tables part. 2. All pages of that block are compared at once.
    low, high = np.zeros(len(others), dtype=np.int64), (limits - 1) // _BLOCK_PAGES
    while (low < high).any():
        middle = (low + high + 1) >> 1
        columns = middle * _BLOCK_PAGES
        is_same = batch.tables[mine, columns] == batch.tables[theirs, columns]
        low, high = np.where(is_same, middle, low), np.where(is_same, high, middle - 1)
    size = min(_BLOCK_PAGES, width)
    flat = batch.tables.ravel()
    blocks = as_strided(flat, (len(flat) - size + 1, size), flat.strides * 2, writeable=False)
    first = np.minimum(low * _BLOCK_PAGES, width - size)
    differ = blocks[mine * width + first] != blocks[theirs * width + first]
    found = differ.argmax(axis=1)
    found[~differ[np.arange(len(found)), found]] = size
    return np.minimum.reduceat(np.minimum(first + found, limits), ends[:-1] - np.arange(len(ends) - 1))


def _best(levels: list[_Level]) -> SharedPrefixes | None:
    """The groups that save most: each group whole, or its parts if these save more together. None if all of them save
    less than the fixed cost."""
    of_parts: list[np.ndarray] = [np.zeros(len(level.worth)) for level in levels]
    best: list[np.ndarray] = [np.maximum(level.worth, 0) for level in levels]
    for index in range(len(levels) - 1, 0, -1):
        of_parts[index - 1] = np.bincount(levels[index].parents, best[index], len(of_parts[index - 1]))
        best[index - 1] = np.maximum(best[index - 1], of_parts[index - 1])
    if not levels or best[0].sum() <= _STARTS_BYTES:
        return None
    members, sizes, num_pages = [], [np.zeros(1, dtype=np.int64)], []
    is_open = np.ones(len(levels[0].worth), dtype=bool)
    for index, (level, parts) in enumerate(zip(levels, of_parts, strict=True)):
        if index:
            is_open = is_open[level.parents]
        taken = is_open & (level.worth > parts)
        members.append(level.chunks[level.spread(taken)])
        sizes.append((level.ends[1:] - level.ends[:-1])[taken])
        num_pages.append(level.num_pages[taken])
        is_open &= ~taken
    ends = np.cumsum(np.concatenate(sizes))
    found = np.concatenate(members), ends, np.concatenate(num_pages)
    return SharedPrefixes(*(array.astype(np.int32) for array in found))
