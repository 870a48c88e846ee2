"""Drawing tokens from distributions: random numbers that depend on (seed, position) alone, the filters top-k, top-p and
min-p, and the inverse of the cumulative distribution. Pure functions over NumPy arrays.

PyTorch has no such filters for a CPU: whole steps of SmolLM2-135M in float32 on one thread take longer with each of
these (top-p 0.9, top-k 50 and min-p 0.05, at temperature 1).

| instead of `draw` | batch 1 | batch 8 | batch 32 |
| --- | --- | --- | --- |
| `worker.sampling.topk_topp`, with its sort for top-k or top-p | 6-7% | 30% | 47-55% |
| the same after `torch.topk(1024)`, which drops tokens of a flat row | 1% | 3-4% | 4-5% |
| the same after these candidates, gathered by PyTorch | 1% | 1-2% | 1-3% |

At temperature 1.5 the last one takes 5%, 15% and 30% longer: a row then has thousands of candidates, which NumPy sorts
without their ids.
"""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 64
_SMALLEST = np.nextafter(np.float32(0), np.float32(1))  # masked tokens have probability 0 and are no candidates
# The first pass looks only at tokens within the first factor of the likeliest: about 400 of SmolLM2's vocabulary at
# temperature 1. Rows whose filters reach further down try the next factor, in the end the whole vocabulary.
_REACHES = (float(np.exp(-8.0)), float(np.exp(-14.0)), 0.0)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), float64[n], from seeds uint64[n] and positions uint64[n]. They are a hash, so no generator's
    state has to survive a preemption or move to another replica."""
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64 on purpose
        bits = _mix(_mix(seeds + _GAMMA) + (positions + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    probs: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, uniforms: np.ndarray
) -> np.ndarray:
    """Draws a token id for each row, int64[n].

    | argument | dtype | off |
    | --- | --- | --- |
    | `probs` | float32[n, vocab], every row sums to 1 | |
    | `top_k` | int[n] | 0 |
    | `top_p` | float64[n] | 1 |
    | `min_p` | float64[n] | 0 |
    | `uniforms` | float64[n] in [0, 1) | |

    The filters apply in this order. At least one token stays. Of equally likely tokens the smaller id ranks first.

    1. Top-k keeps the `top_k` likeliest tokens, renormalised.
    2. Top-p keeps the fewest of these that together reach `top_p`.
    3. Min-p keeps those of these that are at least `min_p` times as likely as the likeliest.

    The vocabulary is not sorted: a row sorts the tokens within a factor of its likeliest, and more only if its filters
    reach further down. That costs about a millisecond for a row that is nearly flat.
    """
    tokens = np.empty(len(probs), dtype=np.int64)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    unfiltered = np.flatnonzero(~filtered)
    if len(unfiltered):
        tokens[unfiltered] = _invert_blocks(_rows(probs, unfiltered), uniforms[unfiltered])
    pending = np.flatnonzero(filtered)
    for reach in _REACHES:
        if not len(pending):
            break
        # After top-k, top-p is relative to the mass of all k tokens, including those that min-p drops.
        least = np.where((top_k > 0) & (top_p < 1), 0.0, min_p)
        missed = []
        for row, (values, ids) in zip(
            pending, _candidates(_rows(probs, pending), top_k[pending], least[pending], reach), strict=True
        ):
            cut = _cut(values, int(top_k[row]), float(top_p[row]), float(min_p[row]), reach)
            if cut is None:
                missed.append(row)
            else:
                tokens[row] = _pick(values, ids, *cut, uniforms[row])
        pending = np.array(missed, dtype=np.int64)
    return tokens


def _rows(matrix: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return matrix if len(rows) == len(matrix) else matrix[rows]


def _candidates(
    probs: np.ndarray, top_k: np.ndarray, min_p: np.ndarray, reach: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(probabilities float32, ids) of each row's candidates, by ascending id: tokens that are at least `reach` times as
    likely as the likeliest, without those that top-k or min-p certainly drop."""
    n, vocab = probs.shape
    floor = probs.max(axis=1) * np.maximum(reach, min_p)
    floor *= 1 - 1e-6  # `_cut` decides on tokens that rounding puts at the edge
    rows = np.flatnonzero((top_k > 0) & (top_k <= vocab // _BLOCK))
    if len(rows):
        # At least k tokens reach the k-th largest of the blocks' maxima.
        whole = _rows(probs[:, : vocab // _BLOCK * _BLOCK], rows)
        heads = np.sort(whole.reshape(len(rows), -1, _BLOCK).max(axis=2), axis=1)
        floor[rows] = np.maximum(floor[rows], heads[np.arange(len(rows)), heads.shape[1] - top_k[rows]])
    floor = np.maximum(floor.astype(np.float32), _SMALLEST)
    found = np.flatnonzero(probs >= floor[:, None])
    edges = np.searchsorted(found, np.arange(n + 1) * vocab)
    ids = [found[edges[i] : edges[i + 1]] - i * vocab for i in range(n)]
    return [(probs[i, ids[i]], ids[i]) for i in range(n)]


def _cut(values: np.ndarray, top_k: int, top_p: float, min_p: float, reach: float) -> tuple[int, float] | None:
    """Number of the likeliest tokens that the filters keep, and the probability of the last of them. None if `values`,
    the tokens within `reach`, are too few to tell."""
    ranked = np.sort(values)[::-1]
    open_end = reach > 0 and min_p < reach
    total = 1.0
    if top_k:
        if len(ranked) < top_k and (open_end or (reach > 0 and top_p < 1)):
            return None
        ranked = ranked[:top_k]
        open_end = False
    keep = len(ranked)
    if top_p < 1:
        mass = np.cumsum(ranked, dtype=np.float64)
        if top_k:
            total = float(mass[-1])
        reaching = int(np.searchsorted(mass, top_p * total)) + 1
        if reaching <= keep:
            keep, open_end = reaching, False
    if open_end:
        return None
    if min_p > 0:
        keep = max(1, min(keep, int((ranked >= min_p * ranked[0]).sum())))
    return keep, float(ranked[keep - 1])


def _pick(values: np.ndarray, ids: np.ndarray, keep: int, last: float, uniform: float) -> int:
    """Draws one of the `keep` likeliest tokens, the least likely of which has probability `last`.

    The cumulative distribution is in the order of ids: a small difference in the logits then moves a boundary a little.
    In the order of rank it could swap two tokens.
    """
    kept = np.flatnonzero(values >= last)
    if len(kept) > keep:  # ties for the last ones
        ties = values == last
        room = keep - int((values > last).sum())
        kept = np.flatnonzero((values > last) | (ties & (np.cumsum(ties) <= room)))
    mass = np.cumsum(values[kept], dtype=np.float64)
    index = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    return int(ids[kept[min(index, keep - 1)]])


def _invert(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """The column at which each row's cumulative weight passes `uniforms` times its sum: never a column of weight 0."""
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    column = (cumulative <= (uniforms * cumulative[:, -1])[:, None]).sum(axis=1)
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    return np.minimum(column, last)  # u * sum may round up to the sum itself


def _invert_blocks(probs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """`_invert` for whole vocabularies: over the sums of blocks first, then inside one block."""
    n, vocab = probs.shape
    if vocab % _BLOCK:
        probs = np.pad(probs, ((0, 0), (0, -vocab % _BLOCK)))
    blocks = probs.reshape(n, -1, _BLOCK)
    sums = blocks.sum(axis=2)
    block = _invert(sums, uniforms)
    rows = np.arange(n)
    cumulative = np.cumsum(sums, axis=1, dtype=np.float64)
    inside = uniforms * cumulative[:, -1] - (cumulative[rows, block] - sums[rows, block])
    share = np.clip(inside / sums[rows, block], 0.0, np.nextafter(1.0, 0.0))
    return block * _BLOCK + _invert(blocks[rows, block], share)
