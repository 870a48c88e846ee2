"""The plan of split-KV attention: items of about equal size, each some queries over a range of keys.

Made on the host once a step, and run by `kernels.attention.split_kv_kernel`.

| word | meaning |
| --- | --- |
| block | queries that see the same keys: tokens of one chunk, or sequences of a group that shares a prefix |
| item | one block over one range of its keys: what one program computes for one KV head |
| part | one query's output over one range, with the logarithm to base 2 of the sum of its weights |

A query that one item covers alone has its output at once. Otherwise its items leave parts, which are merged.

On an H200 a Llama layer of 64 groups of 8 decodes takes 275 us with shared prefixes and remainders as items of one
launch; it took 313 us with FlashInfer for the remainders.
"""

from dataclasses import dataclass

import numpy as np

from kernels.attention.interface import AttentionBatch, SharedPrefixes, flat_pages

# Columns of `SplitKVPlan.items`.
FIELDS = 7


@dataclass(frozen=True)
class QueryBlocks:
    """Blocks of queries that see the same keys, before the keys are cut into ranges. All integers `[num_blocks]`.

    | column | meaning |
    | --- | --- |
    | `firsts` | the block's first token in the batch; if negative, its queries are `members` from `~firsts` on |
    | `counts` | number of queries |
    | `pages` | where the page of position 0 stands in `PageLists.pages` |
    | `first_keys`, `last_keys` | the positions that the queries see, end exclusive; no query sees beyond its own |
    | `positions` | position of the first query |
    """

    firsts: np.ndarray
    counts: np.ndarray
    pages: np.ndarray
    first_keys: np.ndarray
    last_keys: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class SplitKVPlan:
    """The attention of one step, for all layers that have the same window. All arrays are int32.

    `items` `[num_items, FIELDS]` has the item with the longest range first. Its columns are those of `QueryBlocks` in
    their order, with the keys of the item's range, and a last one: the item's index among the parts of its queries,
    or -1 if it covers them alone.

    `slots` `[num_tokens]` says where each token's parts begin in `PartialOutputs`, `counts` `[num_tokens]` how many
    there are: 0 if one item covers the token.
    """

    items: np.ndarray
    slots: np.ndarray
    counts: np.ndarray

    def behind(self, tokens: int) -> "SplitKVPlan":
        """The same plan for a batch with `tokens` more tokens in front, for which there is nothing to do. The plan must
        have no groups."""
        if not tokens:
            return self
        items, nothing = self.items.copy(), np.zeros(tokens, dtype=np.int32)
        items[:, 0] += tokens
        return SplitKVPlan(items, np.concatenate((nothing, self.slots)), np.concatenate((nothing, self.counts)))


@dataclass(frozen=True)
class PageLists:
    """The pages that one step reads: `pages` is int32, the others are integers.

    | field | meaning |
    | --- | --- |
    | `pages` | pages of the groups' prefixes, then each chunk's own |
    | `groups` | where position 0 of each group stands in `pages` |
    | `chunks` | the same for each chunk, as if its group's prefix were listed again right before its own pages |
    """

    pages: np.ndarray
    groups: np.ndarray
    chunks: np.ndarray


def tables(batch: AttentionBatch, shared: SharedPrefixes, page_size: int, *, repeat: bool) -> PageLists:
    """The pages that a batch reads. With `repeat`, a chunk's pages include the prefix that its group shares."""
    if not len(shared.members):  # a short cut: most steps share nothing, and the host has only a step's time to plan
        counts = -(-(batch.starts + batch.lengths) // page_size)
        pages = flat_pages(batch.tables, batch.rows, counts)
        return PageLists(pages, np.zeros(0, dtype=np.int64), np.cumsum(counts, dtype=np.int64) - counts)
    skipped = np.zeros(len(batch.rows), dtype=np.int64) if repeat else shared.pages_of(len(batch.rows)).astype(np.int64)
    own = -(-(batch.starts + batch.lengths) // page_size) - skipped
    leaders = batch.rows[shared.members[shared.ends[:-1]]]
    counts = np.concatenate((shared.num_pages, own))
    firsts = np.concatenate((np.zeros_like(shared.num_pages), skipped))
    pages = flat_pages(batch.tables, np.concatenate((leaders, batch.rows)), counts, firsts)
    places = np.cumsum(counts) - counts - firsts
    return PageLists(pages, places[: len(leaders)], places[len(leaders) :])


def of_groups(shared: SharedPrefixes, pages: np.ndarray, page_size: int, tile_tokens: int) -> QueryBlocks:
    """Blocks of the prefixes that groups share, each of up to `tile_tokens` members of one group."""
    sizes = np.diff(shared.ends)
    group, before = _tiles(sizes, tile_tokens)
    keys = shared.num_pages[group] * page_size
    counts = np.minimum(sizes[group] - before, tile_tokens)
    return QueryBlocks(~(shared.ends[group] + before), counts, pages[group], np.zeros_like(keys), keys, keys)


def of_chunks(
    starts: np.ndarray, lengths: np.ndarray, pages: np.ndarray, seen: np.ndarray, window: int | None, tile_tokens: int
) -> QueryBlocks:
    """Blocks of the tokens of chunks, up to `tile_tokens` each. The blocks of chunk c begin at position `seen[c]`:
    keys before that are in its group's prefix. With a window they begin where the first query's window does."""
    chunk, before = _tiles(lengths, tile_tokens)
    counts, positions = np.minimum(lengths[chunk] - before, tile_tokens), starts[chunk] + before
    first_keys = seen[chunk] if window is None else np.maximum(positions - window + 1, 0)
    firsts = (np.cumsum(lengths) - lengths)[chunk] + before
    return QueryBlocks(firsts, counts, pages[chunk], first_keys, positions + counts, positions)


def work(
    shared: SharedPrefixes, groups: QueryBlocks, chunks: QueryBlocks, most: int, step: int, least: int = 1
) -> SplitKVPlan:
    """Cuts blocks into items over ranges of about the same size: multiples of `step` keys, and at least about `least`.
    Makes at most `most + num_blocks` items."""
    blocks = QueryBlocks(*(np.concatenate(pair) for pair in zip(_columns(groups), _columns(chunks), strict=True)))
    counts, sizes = cut(blocks, most, step, least)
    of_group, of_chunk = np.split(counts, [len(groups.firsts)])
    before = np.zeros(int(chunks.counts.sum()), dtype=np.int64)
    # Members are chunks of one token. These come first in a batch, so chunk, token and block have the same index.
    before[shared.members] = np.repeat(of_group, groups.counts)
    first_before = before[chunks.firsts]
    is_whole = (of_chunk == 1) & (first_before == 0)
    parts = before + np.repeat(np.where(is_whole, 0, of_chunk), chunks.counts)
    first_part = np.concatenate((np.zeros(len(of_group), dtype=np.int64), np.where(is_whole, -1, first_before)))
    slots = np.cumsum(parts) - parts
    return SplitKVPlan(_items(blocks, counts, sizes, first_part), slots.astype(np.int32), parts.astype(np.int32))


def cut(blocks: QueryBlocks, most: int, step: int, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many ranges each block is cut into, and how many keys a range has: int64 `[num_blocks]` each.

    - Ranges are about the same size in all blocks: a multiple of `step` keys, and about `least` or more. The last range
      of a block may be shorter.
    - There are at most `most + num_blocks` ranges. Blocks that are cut at all have at most `2 * most` of them.
    """
    lengths = blocks.last_keys.astype(np.int64) - blocks.first_keys
    even = max(step, least, -(-int(lengths.sum()) // most))
    sizes = -(-lengths // (-(-lengths // even) * step)) * step
    return -(-lengths // sizes), sizes


def _items(blocks: QueryBlocks, counts: np.ndarray, sizes: np.ndarray, first_part: np.ndarray) -> np.ndarray:
    """Makes one item for each range, as `SplitKVPlan.items` has them. `first_part` is the index that the first range of
    a block has among the parts of its queries, or -1 for a block that one item covers."""
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
    """Cuts each of `lengths` into tiles of up to `size`. Returns for each tile the index of its length, and where in
    that length it begins."""
    tiles = -(-lengths // size)
    which = np.repeat(np.arange(len(tiles)), tiles)
    return which, (np.arange(len(which)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * size


def _columns(blocks: QueryBlocks) -> tuple[np.ndarray, ...]:
    return blocks.firsts, blocks.counts, blocks.pages, blocks.first_keys, blocks.last_keys, blocks.positions
