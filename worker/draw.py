"""One token out of a distribution: random numbers that depend on nothing but (seed, position), the filters top-k, top-p
and min-p, and the inverse of the cumulative distribution. Pure functions over NumPy arrays."""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 64
_SMALLEST = np.nextafter(np.float32(0), np.float32(1))  # what is masked has probability 0
# At first only tokens within this factor of the likeliest are looked at: 400 or so of SmolLM2's vocabulary at
# temperature 1. Rows whose filters reach further down get the next one, and in the end the whole vocabulary.
_REACHES = (float(np.exp(-8.0)), float(np.exp(-14.0)), 0.0)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), float64[n], from seeds uint64[n] and positions uint64[n]: a hash, so that no generator's state
    has to survive a preemption or to travel to another replica."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        bits = _mix(_mix(seeds + _GAMMA) + (positions + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(
    probs: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, uniforms: np.ndarray
) -> np.ndarray:
    """One token id a row, int64[n].

    `probs` float32[n, vocab], every row summing to 1; `top_k` int[n] (0: off), `top_p` (1: off), `min_p` (0: off) and
    `uniforms` float64[n]. The filters apply in that order: the `top_k` likeliest; of those, renormalised, the fewest
    that reach `top_p`; of those, the ones at least `min_p` times as likely as the likeliest. At least one token stays.
    Of equally likely tokens the one with the smaller id ranks first.

    Nothing sorts the vocabulary: a row sorts what is within a factor of its likeliest token, and more only if its
    filters turn out to reach further down, which costs about a millisecond for a row that is nearly flat.
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
        # Top-p after top-k is of the mass of all k, also of those that min-p drops.
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
    """For each row the tokens, by ascending id, that are at least `reach` times as likely as the likeliest, and by
    top-k or min-p not out of the question: (probabilities float32, ids)."""
    n, vocab = probs.shape
    floor = probs.max(axis=1) * np.maximum(reach, min_p)
    floor *= 1 - 1e-6  # one that rounding puts at the edge is for `_cut` to judge
    rows = np.flatnonzero((top_k > 0) & (top_k <= vocab // _BLOCK))
    if len(rows):
        # At least k tokens reach the k-th largest of the blocks' largest.
        whole = _rows(probs[:, : vocab // _BLOCK * _BLOCK], rows)
        heads = np.sort(whole.reshape(len(rows), -1, _BLOCK).max(axis=2), axis=1)
        floor[rows] = np.maximum(floor[rows], heads[np.arange(len(rows)), heads.shape[1] - top_k[rows]])
    floor = np.maximum(floor.astype(np.float32), _SMALLEST)
    found = np.flatnonzero(probs >= floor[:, None])
    edges = np.searchsorted(found, np.arange(n + 1) * vocab)
    ids = [found[edges[i] : edges[i + 1]] - i * vocab for i in range(n)]
    return [(probs[i, ids[i]], ids[i]) for i in range(n)]


def _cut(values: np.ndarray, top_k: int, top_p: float, min_p: float, reach: float) -> tuple[int, float] | None:
    """How many of the likeliest the filters keep, and the probability of the last of them. None if `values`, all that
    are within `reach`, are too few to tell."""
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
    """Draws among the `keep` likeliest, the least likely of which has probability `last`. In the order of ids: there a
    small difference in the logits moves a boundary a little, while in the order of rank it may swap two tokens."""
    kept = np.flatnonzero(values >= last)
    if len(kept) > keep:  # ties for the last places
        ties = values == last
        room = keep - int((values > last).sum())
        kept = np.flatnonzero((values > last) | (ties & (np.cumsum(ties) <= room)))
    mass = np.cumsum(values[kept], dtype=np.float64)
    place = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    return int(ids[kept[min(place, keep - 1)]])


def _invert(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """The column of each row at which its cumulative weight passes `uniforms` of its sum; never one of weight 0."""
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    column = (cumulative <= (uniforms * cumulative[:, -1])[:, None]).sum(axis=1)
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    return np.minimum(column, last)  # u * sum may round up to the sum itself


def _invert_blocks(probs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """`_invert` for whole vocabularies: sums of blocks first, then inside the one block."""
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
