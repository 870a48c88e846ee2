"""How many tokens of a sequence a step computes: pure, so that the scheduler and a simulator share it.

`chunk_tokens` has the last word: no more than is missing, than the batch may take, than there are pages for. What the
batch may take is a number of tokens; where it is a time, `tokens_within` says how many tokens that is.
"""

import math
from collections.abc import Sequence

from pipeline.cost import Coefficients, CostModel
from pipeline.shape import KNOTS, TILED_FROM, BatchShape, in_tiles


def chunk_tokens(missing: int, budget: int, room: int) -> int:
    """The size of the next chunk of a sequence that lacks `missing` tokens; 0 when none can be computed now.

    `budget`: tokens that the step may still take, its decodes already counted, so that a long prompt never holds them
    up (stall-free batching, https://arxiv.org/abs/2403.02310). `room`: tokens for which the sequence has pages or
    could get some. Raises ValueError when nothing is missing: such a sequence has no business in a batch.
    """
    if missing < 1:
        raise ValueError("a sequence with nothing missing has no next chunk")
    return max(0, min(missing, budget, room))


def tokens_within(models: Sequence[CostModel], batch: BatchShape, start: int, target_s: float, most: int) -> int:
    """The most tokens, up to `most`, that a chunk with `start` tokens before it may have so that none of the stages is
    predicted to take longer than `target_s` for the batch and the chunk; 0 when there is no such chunk.

    A batch of more than `TILED_FROM` tokens is filled to whole tiles: what is computed of a tile is paid for as a
    whole. So is what a graph computes: one of fewer tokens has the size of a graph, or as many of the next one's as
    the attention to so many leaves time for. Never more for a later start or a shorter time, nor by a tile for a fuller
    batch."""
    for model in models:
        if most < 1:
            return 0
        most = _tokens_within(model.coefficients, batch, start, target_s, most)
    return most


def _tokens_within(cost: Coefficients, batch: BatchShape, start: int, target_s: float, most: int) -> int:
    """For one stage. With x tokens more the batch takes

        square x^2 + prefix_product start x + T(n + x) + (what does not depend on x)

    seconds, where T, the cost of rows, is piecewise linear with growing slopes where there are no rows for nothing."""
    if target_s == math.inf:
        return most
    n = batch.tokens
    if most == 1:
        batch.add(start, 1)
        fits = cost.predict(batch) <= target_s
        batch.remove(start, 1)
        return 1 if fits else 0
    rest = cost.besides_rows(batch) - target_s + cost.chunk + cost.prefix * start
    if n < 2:
        rest += cost.several
    if not batch.chunks:
        rest += cost.mixed
    linear = cost.prefix_product * start
    total = n + _root(cost, n, linear, rest)
    if (padded := cost.rows.mixed(total)) > total:
        begun = n + _floor(_quadratic_root(cost.square, linear, rest + cost.of_rows(padded)))
        total = max(min(begun, padded), cost.rows.whole(total))
    elif total > TILED_FROM:
        total = in_tiles(total, up=False)
        if total <= n:  # what is left of the tile that the batch has begun: every token saves an unused row
            full = in_tiles(n, up=True)
            total = min(full, n + _root(cost, n, linear - cost.unused_row, rest + cost.unused_row * (full - n)))
    return min(most, total - n) if total - n > 1 else 0


def _root(cost: Coefficients, n: int, linear: float, rest: float) -> int:
    """The largest x >= 0 with square x^2 + linear x + T(n + x) + rest <= 0, or 0."""
    for i in range(len(KNOTS) - 1, -1, -1):
        x = _quadratic_root(cost.square, linear + cost.slopes[i], rest + cost.slopes[i] * n + cost.offsets[i])
        if x < 0:
            return 0  # T(n) is at least what any segment says of n
        if n + x > KNOTS[i]:
            return _floor(x)
    return 0


def _quadratic_root(a: float, b: float, c: float) -> float:
    """The largest x >= 0 with a x^2 + b x + c <= 0, where a and b are not negative; -1 where there is none."""
    if c > 0:
        return -1.0
    if a > 0:
        # The form that does not cancel where the square is small.
        return -2.0 * c / (b + math.sqrt(b * b - 4.0 * a * c)) if c < 0 else 0.0
    return -c / b if b > 0 else math.inf


def _floor(x: float) -> int:
    return int(min(max(x, 0.0), 1e9) + 1e-9)
