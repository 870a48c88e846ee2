"""The highest rate of requests that a replica sustains within its objectives.

As Sarathi-Serve measures it (https://arxiv.org/abs/2403.02310, section 5): the 99th percentile of the time between
tokens is at most 5 (strict) or 25 (relaxed) times one decode iteration of 32 sequences with 4,096 tokens of context,
and half of the requests are scheduled within 2 seconds.
"""

from collections.abc import Callable

STRICT, RELAXED = 5.0, 25.0
DELAY_S = 2.0
STEP = 1.5  # from one rate to the next, at most, before the highest lies between two
LEAST = 1 / 20  # of a guess


def capacity(
    holds: Callable[[float], bool],
    guess: float,
    most: float,
    precision: float = 0.02,
    least: float | None = None,
    step: float = STEP,
) -> float:
    """The highest rate up to `most` at which `holds`, found to within `precision` of it: from `guess` up or down by
    `step` and then more, until it lies between two rates, then by bisection. 0 where it does not hold at `least`, or
    else at a twentieth of `guess`."""
    least = guess * LEAST if least is None else least
    low = high = guess = max(guess, least)
    if holds(guess):
        while low < most and holds(high := min(low * step, most)):
            low, step = high, min(step * step, STEP)
        if low >= most:
            return low
    else:
        while high > least and not holds(low := max(high / step, least)):
            high, step = low, min(step * step, STEP)
        if high <= least:
            return 0.0
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
