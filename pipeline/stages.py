"""Which layers a stage holds."""

import itertools
import math
import operator
from collections.abc import Callable, Sequence


def split_layers(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Cuts layers into `stages` contiguous ranges, none empty, so that the costliest stage costs as little as it can,
    and, of such cuts, so that the others are as even as they can be (least sum of squares).

    `costs` [layers]: what each layer costs, in whatever unit; `first` and `last`: what the first stage (embedding) and
    the last (norm, head, sampling) cost besides. Raises ValueError for fewer layers than stages or a negative cost.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages")
    if min(*costs, first, last, math.inf) < 0:
        raise ValueError("a cost is negative")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    def of_stage(stage: int, begin: int, end: int) -> float:
        return before[end] - before[begin] + first * (stage == 0) + last * (stage == stages - 1)

    worst, _ = _best(len(costs), stages, of_stage, max)

    def square(stage: int, begin: int, end: int) -> float:
        cost = of_stage(stage, begin, end)
        return cost * cost if cost <= worst * (1 + 1e-9) else math.inf

    _, cuts = _best(len(costs), stages, square, operator.add)
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def _best(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least value of the stages' costs joined, and where its cuts are, by dynamic programming over the first layers
    and stages, in O(stages layers^2). `cost` is of a stage, from one layer up to another."""
    least = [0.0] + [math.inf] * layers
    choices: list[list[int]] = []
    for stage in range(stages):
        values, cuts = [math.inf] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - stage - 1) + 1):
            for begin in range(stage, end):
                value = join(least[begin], cost(stage, begin, end))
                if value < values[end]:
                    values[end], cuts[end] = value, begin
        least = values
        choices.append(cuts)
    ends = [layers]
    for cuts in reversed(choices):
        ends.append(cuts[ends[-1]])
    return least[layers], ends[::-1]
