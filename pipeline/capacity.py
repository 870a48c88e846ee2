"""The highest rate of requests that a replica sustains within its objectives.

As Sarathi-Serve measures it (https://arxiv.org/abs/2403.02310, section 5): the 99th percentile of the time between
tokens is at most 5 (strict) or 25 (relaxed) times one decode iteration of 32 sequences with 4,096 tokens of context,
and half of the requests are scheduled within 2 seconds.
"""

from collections.abc import Callable

STRICT, RELAXED = 5.0, 25.0
DELAY_S = 2.0
STEP = 1.5  # from one rate to the next, before the highest lies between two


def capacity(holds: Callable[[float], bool], guess: float, most: float, precision: float = 0.02) -> float:
    """The highest rate up to `most` at which `holds`, found to within `precision` of it: from `guess` up or down by
    STEP until it lies between two rates, then by bisection. 0 where it does not hold at a twentieth of `guess`."""
    low = high = guess
    if holds(guess):
        while low < most and holds(high := min(low * STEP, most)):
            low = high
        if low >= most:
            return low
    else:
        while not holds(low := high / STEP):
            high = low
            if high < guess / 20:
                return 0.0
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
