"""Which sequences of a decoding batch begin with the same pages, so that attention may read those once for all of them.

What is read here is page tables, on the host: all ranks of a replica, which hold the same tables, find the same.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kernels.attention import AttentionBatch, AttentionShape, SharedPrefixes

# Bytes that a GPU reads in the time that reading together takes more in each layer, whatever it reads. (H200,
# 4.28 TB/s. Of 117 MB that 8 sequences save, nothing is won, since what they read apart comes from a cache in part; of
# 134 MB that 64 in pairs save, 4 us are.)
_STARTS_BYTES = 100e6
# Prefixes that stand one on another are looked for to this depth: system prompt, tenant, session and turn, say.
_MOST_LEVELS = 4
# Steps of the same sequences for which groups are not looked for again.
_MOST_STEPS = 32
# Pages of two tables that are compared at once.
_BLOCK_PAGES = 64
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class _Level:
    """Groups that share one page more than the groups that they are parts of, their `parents` in the level before:
    `chunks[ends[g] : ends[g + 1]]`. `worth` is in bytes a layer."""

    chunks: np.ndarray
    ends: np.ndarray
    parents: np.ndarray
    num_pages: np.ndarray
    worth: np.ndarray

    def spread(self, of_groups: np.ndarray) -> np.ndarray:
        """A value of each group for each of its chunks."""
        return np.repeat(of_groups, self.ends[1:] - self.ends[:-1])


class PrefixFinder:
    """Finds the groups that save most, a sequence in one group at most: what groups of groups share each group reads.

    It takes as given that two tables with the same page in the same place begin with the same tokens, as those of a
    radix tree's users do, and is fast by that: logarithmic in the length of the prefixes. The last batch's groups are
    kept while the same sequences decode on, but for `_MOST_STEPS`: the tree may give one of them pages that others have
    in the place of its own.
    """

    def __init__(self, page_size: int, shape: AttentionShape, itemsize: int) -> None:
        """`itemsize`: bytes of one number of the pages."""
        self.page_size = page_size
        self._page_bytes = 2 * shape.num_kv_heads * page_size * shape.head_dim * itemsize
        # What one sequence's part of the result costs on its way to the rest of it: written once, read once.
        self._part_bytes = 2 * shape.num_heads * shape.head_dim * _FLOAT32_BYTES
        nothing = np.zeros(0, dtype=np.int32)
        self._rows, self._starts, self._first_pages = nothing, nothing, nothing
        self._found: SharedPrefixes | None = None
        self._steps = 0
        # Chunk, place and page of the last page that each member of a group shares.
        self._last_pages = nothing, nothing, nothing

    def find(self, batch: AttentionBatch) -> SharedPrefixes | None:
        """The groups of a batch of chunks of one token. None unless reading together saves more than it costs. The same
        object as before means: the same groups, which share the same pages."""
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
        """Whether this batch is the last one, a token later, and has been not too often."""
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
    """Two or more chunks of a group with the same page (-1: none): the chunks, 0 and where each lot of them ends, and
    the group that it is of."""
    keys = (groups << 32) + pages
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    is_first = np.ones(len(order) + 1, dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:-1])
    # Alone is what comes first where the next one does too.
    is_wanted = ~(is_first[:-1] & is_first[1:])
    is_wanted &= pages[order] >= 0
    order, starts = order[is_wanted], is_first[:-1][is_wanted].nonzero()[0]
    return chunks[order], np.append(starts, len(order)), groups[order[starts]]


def _common(batch: AttentionBatch, whole: np.ndarray, chunks: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Pages that the tables of all chunks of a group have in common, one at least: int64 `[num_groups]`."""
    # Every chunk but its group's first is held to that.
    is_other = np.ones(len(chunks), dtype=bool)
    is_other[ends[:-1]] = False
    leaders = np.repeat(chunks[ends[:-1]], ends[1:] - ends[:-1] - 1)
    others = chunks[is_other]
    width = batch.tables.shape[1]
    mine, theirs = batch.rows[others].astype(np.int64), batch.rows[leaders].astype(np.int64)
    limits = np.minimum(whole[others], whole[leaders])
    # Whole blocks by bisection, then the pages of the block in which they part, side by side.
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
    """Of every group and its parts, whichever is worth more; None if all of them are not worth it."""
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
