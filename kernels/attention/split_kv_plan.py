"""The plan of split-KV attention: items of about equal size, each some queries over a range of keys.

Made on the host once a step, and run by `kernels.attention.split_kv_kernel`. The loops are compiled by numba at import,
before any step. In NumPy they are a hundred operations on arrays of a few numbers each: planning a step with drafts of
one sequence, and filling its graph's inputs, took 0.24 ms, in which the device waited. It takes 0.09 ms (one CPU core,
an 8B model's heads).

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
from numba import njit, types

from kernels.attention.interface import AttentionBatch, SharedPrefixes

# Columns of `SplitKVPlan.items`. Blocks have all but the last.
FIRST, COUNT, PAGE, FIRST_KEY, LAST_KEY, POSITION, _PART = range(7)
BLOCK_FIELDS, FIELDS = 6, 7
_NO_BLOCKS = np.empty((0, BLOCK_FIELDS), dtype=np.int64)
_NONE = np.empty(0, dtype=np.int64)

_I = types.int64
_INTS, _INTS32 = types.Array(types.int64, 1, "C"), types.Array(types.int32, 1, "C")
_TABLE, _TABLE32 = types.Array(types.int64, 2, "C"), types.Array(types.int32, 2, "C")


@dataclass(frozen=True)
class SplitKVPlan:
    """The attention of one step, for all layers that have the same window. All arrays are int32.

    `items` `[num_items, FIELDS]` has the item with the longest range first:

    | column | meaning |
    | --- | --- |
    | 0 | the first token of the item's block in the batch; if negative, its queries are `members` from `~` of it on |
    | 1 | number of queries |
    | 2 | where the page of position 0 stands in `PageLists.pages` |
    | 3, 4 | the positions of the item's keys, end exclusive; no query sees beyond its own |
    | 5 | position of the first query |
    | 6 | the item's index among the parts of its queries, or -1 if it covers them alone |

    `slots` `[num_tokens]` says where each token's parts begin in `PartialOutputs`, `counts` `[num_tokens]` how many
    there are: 0 if one item covers the token.
    """

    items: np.ndarray
    slots: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class PageLists:
    """The pages that one step reads: `pages` is int32, the others are int64.

    | field | meaning |
    | --- | --- |
    | `pages` | pages of the groups' prefixes, then each chunk's own |
    | `groups` | where position 0 of each group stands in `pages` |
    | `chunks` | the same for each chunk, as if its group's prefix were listed again right before its own pages |
    """

    pages: np.ndarray
    groups: np.ndarray
    chunks: np.ndarray


def tables(batch: AttentionBatch, shared: SharedPrefixes, page_size: int, *, repeat: bool, spare: int = 0) -> PageLists:
    """The pages that a batch reads. With `repeat`, a chunk's pages include the prefix that its group shares. After the
    pages there is room for `spare` more, which the caller fills."""
    starts, lengths, rows = (column.astype(np.int64) for column in (batch.starts, batch.lengths, batch.rows))
    if not len(shared.members):
        return PageLists(*_list_pages(batch.tables, rows, starts + lengths, page_size, _NONE, _NONE, _NONE, spare))
    leaders = rows[shared.members[shared.ends[:-1]]]
    skipped = _NONE if repeat else shared.pages_of(len(rows)).astype(np.int64)
    prefixes = shared.num_pages.astype(np.int64)
    return PageLists(*_list_pages(batch.tables, rows, starts + lengths, page_size, leaders, prefixes, skipped, spare))


def of_groups(shared: SharedPrefixes, pages: np.ndarray, page_size: int, tile_tokens: int) -> np.ndarray:
    """Blocks of the prefixes that groups share, each of up to `tile_tokens` members of one group: int64
    `[num_blocks, 6]`, the first columns of `SplitKVPlan.items`. The keys are the whole prefix. `pages`: as
    `PageLists.groups`."""
    if not len(shared.members):  # as in most steps
        return _NO_BLOCKS
    sizes = np.diff(shared.ends)
    tiles = -(-sizes // tile_tokens)
    group = np.repeat(np.arange(len(tiles)), tiles)
    before = (np.arange(len(group)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile_tokens
    blocks = np.zeros((len(group), BLOCK_FIELDS), dtype=np.int64)
    blocks[:, FIRST], blocks[:, COUNT] = ~(shared.ends[group] + before), np.minimum(sizes[group] - before, tile_tokens)
    blocks[:, PAGE], blocks[:, POSITION] = pages[group], shared.num_pages[group] * page_size
    blocks[:, LAST_KEY] = blocks[:, POSITION]
    return blocks


def work(
    batch: AttentionBatch,
    shared: SharedPrefixes,
    groups: np.ndarray,
    chunks: np.ndarray,
    seen: np.ndarray,
    window: int | None,
    *,
    tile_tokens: int,
    most: int,
    step: int,
    least: int = 1,
    behind: int = 0,
    padding: int = 0,
    scratch: int = 0,
) -> SplitKVPlan:
    """Cuts a batch into items over ranges of about the same number of keys: a multiple of `step`, and about `least` or
    more. The last range of a block may be shorter. There are at most `most + num_blocks` items; those of blocks that
    are cut at all are at most `2 * most`.

    - `groups`: the blocks of `shared`, as `of_groups` returns them.
    - `chunks`: as `PageLists.chunks`.
    - `seen`: int64 [chunks], the position from which a chunk's blocks read: keys before that are in its group's prefix.
      With a `window`, blocks read from where the first query's window begins.
    - `tile_tokens`: most tokens of a block.
    - `behind`: number of tokens in front of the batch, for which there is nothing to do. Only without groups.
    - `padding`: number of tokens after the batch. Each sees one token, of the page at `scratch` of `PageLists.pages`.
    """
    starts, lengths = batch.starts.astype(np.int64), batch.lengths.astype(np.int64)
    members = shared.members.astype(np.int64)
    limits = tile_tokens, most, step, least, behind, padding, scratch
    return SplitKVPlan(*_work(starts, lengths, members, groups, chunks, seen, -1 if window is None else window, limits))


def token_rows(
    batch: AttentionBatch, num_kv_heads: int, page_size: int, padding: int = 0, scratch: int = 0
) -> np.ndarray:
    """Where all tokens of the batch have head 0, as `kernels.attention.interface.slot_mapping` numbers it, and after
    them `padding` tokens at the beginning of page `scratch`: int64."""
    starts, lengths, rows = (column.astype(np.int64) for column in (batch.starts, batch.lengths, batch.rows))
    return _token_rows(batch.tables, rows, starts, lengths, num_kv_heads, page_size, padding, scratch)


@njit(inline="always")
def _ceil(a, b):  # type: ignore[no-untyped-def]
    return -(-a // b)


@njit(types.Tuple((_INTS32, _INTS, _INTS))(_TABLE32, _INTS, _INTS, _I, _INTS, _INTS, _INTS, _I), cache=True)
def _list_pages(tables, rows, ends, page_size, leaders, prefixes, skipped, spare):  # type: ignore[no-untyped-def]
    """As `tables`. `ends`: tokens of each chunk's sequence. `leaders`, `prefixes`: a row and the pages of each group.
    `skipped`: pages of each chunk's prefix that are not listed again; may be empty."""
    total = spare
    for i in range(len(prefixes)):
        total += prefixes[i]
    for c in range(len(rows)):
        total += _ceil(ends[c], page_size) - (skipped[c] if len(skipped) else 0)
    pages = np.empty(total, dtype=np.int32)
    groups, chunks = np.empty(len(prefixes), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    at = 0
    for i in range(len(prefixes)):
        groups[i] = at
        for page in range(prefixes[i]):
            pages[at] = tables[leaders[i], page]
            at += 1
    for c in range(len(rows)):
        first = skipped[c] if len(skipped) else 0
        chunks[c] = at - first
        for page in range(first, _ceil(ends[c], page_size)):
            pages[at] = tables[rows[c], page]
            at += 1
    return pages, groups, chunks


@njit(_INTS(_TABLE32, _INTS, _INTS, _INTS, _I, _I, _I, _I), cache=True)
def _token_rows(tables, rows, starts, lengths, heads, page_size, padding, scratch):  # type: ignore[no-untyped-def]
    found = np.empty(lengths.sum() + padding, dtype=np.int64)
    at = 0
    for c in range(len(rows)):
        for position in range(starts[c], starts[c] + lengths[c]):
            page = np.int64(tables[rows[c], position // page_size])
            found[at] = page * heads * page_size + position % page_size
            at += 1
    found[at:] = scratch * heads * page_size
    return found


@njit(
    types.Tuple((_TABLE32, _INTS32, _INTS32))(_INTS, _INTS, _INTS, _TABLE, _INTS, _INTS, _I, types.UniTuple(_I, 7)),
    cache=True,
)
def _work(starts, lengths, members, groups, chunks, seen, window, limits):  # type: ignore[no-untyped-def]
    """As `work`. `window`: -1 for none."""
    tile_tokens, most, step, least, behind, padding, scratch = limits
    num_groups, num_chunks = len(groups), len(starts)
    num_blocks = num_groups + padding
    for c in range(num_chunks):
        num_blocks += _ceil(lengths[c], tile_tokens)
    blocks = np.empty((num_blocks, BLOCK_FIELDS), dtype=np.int64)
    blocks[:num_groups] = groups
    at, token = num_groups, 0
    for c in range(num_chunks + padding):
        own = c < num_chunks
        length = lengths[c] if own else 1
        for before in range(0, length, tile_tokens):
            count = min(tile_tokens, length - before)
            position = starts[c] + before if own else 0
            blocks[at, FIRST], blocks[at, COUNT] = token + before, count
            blocks[at, PAGE] = chunks[c] if own else scratch
            if window >= 0:
                blocks[at, FIRST_KEY] = max(position - window + 1, 0)
            else:
                blocks[at, FIRST_KEY] = seen[c] if own else 0
            blocks[at, LAST_KEY], blocks[at, POSITION] = position + count, position
            at += 1
        token += length

    # Ranges of about the same size in all blocks.
    total = 0
    for b in range(num_blocks):
        total += blocks[b, LAST_KEY] - blocks[b, FIRST_KEY]
    even = max(step, least, _ceil(total, most))
    sizes, counts = np.empty(num_blocks, dtype=np.int64), np.empty(num_blocks, dtype=np.int64)
    num_items = longest = 0
    for b in range(num_blocks):
        keys = blocks[b, LAST_KEY] - blocks[b, FIRST_KEY]
        sizes[b] = _ceil(keys, _ceil(keys, even) * step) * step
        counts[b] = _ceil(keys, sizes[b])
        num_items += counts[b]
        longest = max(longest, min(keys, sizes[b]))

    # Members are chunks of one token. These come first in a batch, so chunk and token have the same index.
    parts = np.zeros(behind + token, dtype=np.int32)
    first_part = np.zeros(num_blocks, dtype=np.int64)
    member = 0
    for b in range(num_groups):
        for _ in range(blocks[b, COUNT]):
            parts[members[member]] = counts[b]
            member += 1
    for b in range(num_groups, num_blocks):
        first = behind + blocks[b, FIRST]
        first_part[b] = parts[first]
        if counts[b] == 1 and parts[first] == 0:
            first_part[b] = -1
        else:
            for i in range(first, first + blocks[b, COUNT]):
                parts[i] += counts[b]
        blocks[b, FIRST] = first
    slots = np.empty(behind + token, dtype=np.int32)
    used = 0
    for i in range(len(parts)):
        slots[i] = used
        used += parts[i]

    # The longest range first, by counting: `places[n]` is where the next range of n keys goes.
    places = np.zeros(longest + 1, dtype=np.int64)
    for b in range(num_blocks):
        keys = blocks[b, LAST_KEY] - blocks[b, FIRST_KEY]
        if counts[b] > 1:
            places[sizes[b]] += counts[b] - 1
        places[keys - (counts[b] - 1) * sizes[b]] += 1
    at = 0
    for n in range(longest, -1, -1):
        places[n], at = at, at + places[n]
    items = np.empty((num_items, FIELDS), dtype=np.int32)
    for b in range(num_blocks):
        for r in range(counts[b]):
            first_key = blocks[b, FIRST_KEY] + r * sizes[b]
            last_key = min(first_key + sizes[b], blocks[b, LAST_KEY])
            at = places[last_key - first_key]
            places[last_key - first_key] += 1
            items[at, FIRST], items[at, COUNT], items[at, PAGE] = blocks[b, FIRST], blocks[b, COUNT], blocks[b, PAGE]
            items[at, FIRST_KEY], items[at, LAST_KEY] = first_key, last_key
            items[at, POSITION], items[at, _PART] = blocks[b, POSITION], first_part[b] + r
    return items, slots, parts
