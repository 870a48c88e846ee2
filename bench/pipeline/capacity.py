"""The highest rate of requests that a replica sustains within its objectives.

The objectives are those of Sarathi-Serve (https://arxiv.org/abs/2403.02310, section 5):

- the 99th percentile of the time between tokens (TBT) is at most 5 (strict) or 25 (relaxed) times one decode iteration
  of 32 sequences with 4,096 tokens of context;
- half of the requests are scheduled within 2 seconds.
"""

from collections.abc import Callable

STRICT, RELAXED = 5.0, 25.0
DELAY_S = 2.0
MAX_STEP_FACTOR = 1.5  # largest factor between two rates, until the capacity is bracketed
MIN_RATE = 1 / 20  # lowest rate that is tried, relative to the guess


def capacity(
    holds: Callable[[float], bool],
    guess: float,
    most: float,
    precision: float = 0.02,
    least: float | None = None,
    step: float = MAX_STEP_FACTOR,
) -> float:
    """The highest rate up to `most` at which `holds`, to within the fraction `precision`.

    From `guess` the rate goes up or down by `step`, then by larger factors, until two rates bracket the capacity.
    Bisection does the rest. Returns 0 if `holds` is false at `least` (default: a twentieth of `guess`).
    """
    least = guess * MIN_RATE if least is None else least
    low = high = guess = max(guess, least)
    if holds(guess):
        while low < most and holds(high := min(low * step, most)):
            low, step = high, min(step * step, MAX_STEP_FACTOR)
        if low >= most:
            return low
    else:
        while high > least and not holds(low := max(high / step, least)):
            high, step = low, min(step * step, MAX_STEP_FACTOR)
        if high <= least:
            return 0.0
    while high > low * (1 + precision):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
