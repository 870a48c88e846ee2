"""Attention cut into work of equal size: ranges of keys, each for some queries. Planned on the host, once a step.

What several ranges leave of one query is merged. A part is that query's output over one range, and the logarithm (to
base 2) of the sum of its weights.
"""

from dataclasses import dataclass

import numpy as np

from kernels.attention import AttentionBatch, SharedPrefixes, flat_pages

# Numbers that an item has, as `items` lists them.
FIELDS = 7


@dataclass(frozen=True)
class Blocks:
    """Queries that see the same keys, before these are cut into ranges. All integers `[num_blocks]`.

    Block b is `counts[b]` queries, the tokens of the batch from `firsts[b]` on or, where that is below 0, the members
    of groups from place `~firsts[b]` on. They see the positions `first_keys[b]` to `last_keys[b]` of a sequence, each
    up to its own only; the first query's is `positions[b]`. Position 0 is on page `pages[b]` of a list of pages.
    """

    firsts: np.ndarray
    counts: np.ndarray
    pages: np.ndarray
    first_keys: np.ndarray
    last_keys: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class Work:
    """What a step's layers of one window do: `items` int32 `[num_items, FIELDS]`, the longest first; where the parts of
    each token begin, and how many it has, int32 `[num_tokens]`: none where one item is all of it."""

    items: np.ndarray
    slots: np.ndarray
    counts: np.ndarray

    def behind(self, tokens: int) -> "Work":
        """The same for queries of which none is a member of a group, behind so many for which there is no work."""
        if not tokens:
            return self
        items, nothing = self.items.copy(), np.zeros(tokens, dtype=np.int32)
        items[:, 0] += tokens
        return Work(items, np.concatenate((nothing, self.slots)), np.concatenate((nothing, self.counts)))


@dataclass(frozen=True)
class Tables:
    """Pages of a step, int32: those that groups share, then each chunk's. Position 0 of group g is on page `groups[g]`
    of the list, that of chunk c on page `chunks[c]`, or would be if what its group has were on the list again."""

    pages: np.ndarray
    groups: np.ndarray
    chunks: np.ndarray


def tables(batch: AttentionBatch, shared: SharedPrefixes, page_size: int, *, repeat: bool) -> Tables:
    """The pages that a batch reads; with `repeat` each chunk's are all of its table's."""
    if not len(shared.members):  # as most steps are, each of which the host plans while the GPU computes another
        counts = -(-(batch.starts + batch.lengths) // page_size)
        pages = flat_pages(batch.tables, batch.rows, counts)
        return Tables(pages, np.zeros(0, dtype=np.int64), np.cumsum(counts, dtype=np.int64) - counts)
    skipped = np.zeros(len(batch.rows), dtype=np.int64) if repeat else shared.pages_of(len(batch.rows)).astype(np.int64)
    own = -(-(batch.starts + batch.lengths) // page_size) - skipped
    leaders = batch.rows[shared.members[shared.ends[:-1]]]
    counts = np.concatenate((shared.num_pages, own))
    firsts = np.concatenate((np.zeros_like(shared.num_pages), skipped))
    pages = flat_pages(batch.tables, np.concatenate((leaders, batch.rows)), counts, firsts)
    places = np.cumsum(counts) - counts - firsts
    return Tables(pages, places[: len(leaders)], places[len(leaders) :])


def of_groups(shared: SharedPrefixes, pages: np.ndarray, page_size: int, tile_tokens: int) -> Blocks:
    """What groups share, for up to `tile_tokens` of their members at a time."""
    sizes = np.diff(shared.ends)
    group, before = _tiles(sizes, tile_tokens)
    keys = shared.num_pages[group] * page_size
    counts = np.minimum(sizes[group] - before, tile_tokens)
    return Blocks(~(shared.ends[group] + before), counts, pages[group], np.zeros_like(keys), keys, keys)


def of_chunks(
    starts: np.ndarray, lengths: np.ndarray, pages: np.ndarray, seen: np.ndarray, window: int | None, tile_tokens: int
) -> Blocks:
    """The tokens of chunks, up to `tile_tokens` at a time. Chunk c's see nothing before position `seen[c]`, which its
    group has."""
    chunk, before = _tiles(lengths, tile_tokens)
    counts, positions = np.minimum(lengths[chunk] - before, tile_tokens), starts[chunk] + before
    first_keys = seen[chunk] if window is None else np.maximum(positions - window + 1, 0)
    firsts = (np.cumsum(lengths) - lengths)[chunk] + before
    return Blocks(firsts, counts, pages[chunk], first_keys, positions + counts, positions)


def work(shared: SharedPrefixes, groups: Blocks, chunks: Blocks, most: int, step: int, least: int = 1) -> Work:
    """Items of ranges of about the same size, `step` keys or a multiple, but no block in ranges of fewer than `least`:
    `most`, and one more a block, at most."""
    blocks = Blocks(*(np.concatenate(pair) for pair in zip(_columns(groups), _columns(chunks), strict=True)))
    counts, sizes = cut(blocks, most, step, least)
    of_group, of_chunk = np.split(counts, [len(groups.firsts)])
    before = np.zeros(int(chunks.counts.sum()), dtype=np.int64)
    # The members are single tokens, which come first: each is the token of its own number, and a block.
    before[shared.members] = np.repeat(of_group, groups.counts)
    first_before = before[chunks.firsts]
    is_whole = (of_chunk == 1) & (first_before == 0)
    parts = before + np.repeat(np.where(is_whole, 0, of_chunk), chunks.counts)
    first_part = np.concatenate((np.zeros(len(of_group), dtype=np.int64), np.where(is_whole, -1, first_before)))
    slots = np.cumsum(parts) - parts
    return Work(_items(blocks, counts, sizes, first_part), slots.astype(np.int32), parts.astype(np.int32))


def cut(blocks: Blocks, most: int, step: int, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """How many ranges of how many keys each block is cut into, all but the last ones of `step` keys or a multiple, and
    of about `least` or more. These are `most + num_blocks` items at most, in ranges of about the same size. Those of
    blocks that are cut at all are `2 * most` at most. int64 `[num_blocks]` each.
    """
    lengths = blocks.last_keys.astype(np.int64) - blocks.first_keys
    even = max(step, least, -(-int(lengths.sum()) // most))
    sizes = -(-lengths // (-(-lengths // even) * step)) * step
    return -(-lengths // sizes), sizes


def _items(blocks: Blocks, counts: np.ndarray, sizes: np.ndarray, first_part: np.ndarray) -> np.ndarray:
    """One item for each range: the fields of `Blocks` in their order, but keys are the range's, and then which part of
    its queries it is, from the block's first on; below 0 it is all of them."""
    block = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
    made = np.empty((len(block), FIELDS), dtype=np.int32)
    size = sizes[block]
    first = blocks.first_keys[block] + index * size
    made[:, 0], made[:, 1], made[:, 2] = blocks.firsts[block], blocks.counts[block], blocks.pages[block]
    made[:, 3], made[:, 4] = first, np.minimum(first + size, blocks.last_keys[block])
    made[:, 5], made[:, 6] = blocks.positions[block], first_part[block] + index
    return made[np.argsort(made[:, 3] - made[:, 4], kind="stable")]


def _tiles(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Of tiles of up to `size`: which of `lengths` each is of, and how much of that comes before it."""
    tiles = -(-lengths // size)
    which = np.repeat(np.arange(len(tiles)), tiles)
    return which, (np.arange(len(which)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * size


def _columns(blocks: Blocks) -> tuple[np.ndarray, ...]:
    return blocks.firsts, blocks.counts, blocks.pages, blocks.first_keys, blocks.last_keys, blocks.positions
