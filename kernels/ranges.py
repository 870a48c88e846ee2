"""Attention cut into work of equal size: ranges of keys, each for some queries. Planned on the host, once a step.

What several ranges leave of one query is merged. A part is that query's output over one range, and the logarithm (to
base 2) of the sum of its weights.
"""

from dataclasses import dataclass

import numpy as np

# Numbers that an item has, as `Items` lists them.
FIELDS = 7


@dataclass(frozen=True)
class Blocks:
    """Queries that see the same keys, before these are cut into ranges. All int32 `[num_blocks]`.

    Block b is the queries `firsts[b]` to `firsts[b] + counts[b]` (tokens of the batch, or places in a list of them)
    over the positions `first_keys[b]` to `last_keys[b]` of a sequence, whose pages begin at `pages[b]` of a list of
    pages. `positions[b]` is the first query's, where each sees keys up to its own only.
    """

    firsts: np.ndarray
    counts: np.ndarray
    pages: np.ndarray
    first_keys: np.ndarray
    last_keys: np.ndarray
    positions: np.ndarray


def cut(blocks: Blocks, most: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """How many ranges of how many keys each block is cut into, all but the last ones of `step` keys or a multiple.
    These are `most + num_blocks` items at most, in ranges of about the same size. int64 `[num_blocks]` each.
    """
    lengths = blocks.last_keys.astype(np.int64) - blocks.first_keys
    even = max(step, -(-int(lengths.sum()) // most))
    sizes = -(-lengths // (-(-lengths // even) * step)) * step
    return -(-lengths // sizes), sizes


def items(
    blocks: Blocks, counts: np.ndarray, sizes: np.ndarray, before: np.ndarray, is_whole: np.ndarray
) -> np.ndarray:
    """One item for each range, the longest first: int32 `[num_items, FIELDS]`, the fields of `Blocks` in their order,
    but keys are the range's, and then which part of its queries it is, -1 if it is all of them. `before` are the parts
    that the block's queries have from elsewhere; `is_whole` is where there is one part alone. Both `[num_blocks]`.
    """
    block = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
    made = np.empty((len(block), FIELDS), dtype=np.int32)
    first = blocks.first_keys[block] + index * sizes[block]
    made[:, 0], made[:, 1], made[:, 2] = blocks.firsts[block], blocks.counts[block], blocks.pages[block]
    made[:, 3], made[:, 4] = first, np.minimum(first + sizes[block], blocks.last_keys[block])
    made[:, 5], made[:, 6] = blocks.positions[block], np.where(is_whole[block], -1, before[block] + index)
    return made[np.argsort(made[:, 3] - made[:, 4], kind="stable")]


def slots(parts: np.ndarray) -> np.ndarray:
    """Where the parts of each query begin, one query after the other: int32. `parts` is how many each has."""
    return (np.cumsum(parts) - parts).astype(np.int32)
