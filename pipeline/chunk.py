"""The number of tokens of a sequence that a step computes.

Pure functions, shared by the scheduler and the simulator. `chunk_tokens` decides: at most the remaining tokens, the
step's budget and the room in pages. A budget of time is converted to tokens by `tokens_within`.
"""

import math
from collections.abc import Sequence

from pipeline.cost import Coefficients, CostModel
from pipeline.shape import KNOTS, TILED_FROM, BatchShape, in_tiles


def chunk_tokens(missing: int, budget: int, room: int) -> int:
    """The size of a sequence's next chunk, which has `missing` remaining tokens; 0 if none can be computed now.

    - `budget`: tokens that the step may still take, with its decodes already counted. So a long prompt never stalls
      decodes (stall-free batching, https://arxiv.org/abs/2403.02310).
    - `room`: tokens for which the sequence has pages or could get some.

    Raises ValueError if `missing` is less than 1.
    """
    if missing < 1:
        raise ValueError("a sequence with nothing missing has no next chunk")
    return max(0, min(missing, budget, room))


def tokens_within(models: Sequence[CostModel], batch: BatchShape, start: int, target_s: float, most: int) -> int:
    """The longest chunk after `start` tokens, of at most `most` tokens, with which no stage is predicted to take longer
    than `target_s` for the batch; 0 if there is none.

    - A batch of more than `TILED_FROM` tokens is filled to whole tiles, as a partial tile costs as much as a whole one.
    - A smaller batch may be padded to a CUDA graph, whose padded rows cost as much as used ones. It gets the size of
      the largest graph that fits in the time, or as many tokens of the next graph as the attention to them leaves time
      for.

    A later start or a shorter time never gives more tokens. A fuller batch gives less than a tile more.
    """
    for model in models:
        if most < 1:
            return 0
        most = _tokens_within(model.coefficients, batch, start, target_s, most)
    return most


def _tokens_within(cost: Coefficients, batch: BatchShape, start: int, target_s: float, most: int) -> int:
    """`tokens_within` for one stage. With x more tokens the batch takes

        square x^2 + prefix_product start x + T(n + x) + (terms without x)

    seconds. T, the cost of rows, is piecewise linear with growing slopes where no row is unused.
    """
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
        if total <= n:  # the rest of the tile that the batch has begun: every token saves an unused row
            full = in_tiles(n, up=True)
            total = min(full, n + _root(cost, n, linear - cost.unused_row, rest + cost.unused_row * (full - n)))
    return min(most, total - n) if total - n > 1 else 0


def _root(cost: Coefficients, n: int, linear: float, rest: float) -> int:
    """The largest x >= 0 with square x^2 + linear x + T(n + x) + rest <= 0, or 0."""
    for i in range(len(KNOTS) - 1, -1, -1):
        x = _quadratic_root(cost.square, linear + cost.slopes[i], rest + cost.slopes[i] * n + cost.offsets[i])
        if x < 0:
            return 0  # T(n) is at least the value of every segment at n
        if n + x > KNOTS[i]:
            return _floor(x)
    return 0


def _quadratic_root(a: float, b: float, c: float) -> float:
    """The largest x >= 0 with a x^2 + b x + c <= 0, where a and b are not negative; -1 where there is none."""
    if c > 0:
        return -1.0
    if a > 0:
        # This form does not cancel if `a` is small.
        return -2.0 * c / (b + math.sqrt(b * b - 4.0 * a * c)) if c < 0 else 0.0
    return -c / b if b > 0 else math.inf


def _floor(x: float) -> int:
    return int(min(max(x, 0.0), 1e9) + 1e-9)
