"""Assignment of layers to pipeline stages."""

import itertools
from collections.abc import Sequence


def split_layers(layers: int, stages: int, head: float) -> list[range]:
    """Cuts `layers` equal layers into `stages` contiguous ranges, none empty. The last stage also has the head, which
    reads as many weights as `head` layers.

    No cut is best for both kinds of steps. Decodes read all weights, so the head costs its share. For a prompt, the
    head is computed for one token only and costs next to nothing. The cut chosen minimises the sum, over the two kinds,
    of the costliest stage's cost relative to an even share. Among equal cuts, the one with the most even layers wins.

    Raises ValueError for fewer layers than stages or a negative head.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    if head < 0:
        raise ValueError("the head's cost is negative")
    if stages == 1:
        return [range(layers)]

    def layers_by_stage(last: int) -> list[int]:
        """Layers of each stage if the last stage has `last`."""
        each, more = divmod(layers - last, stages - 1)
        return [each + 1] * more + [each] * (stages - 1 - more) + [last]

    def loss(last: int) -> tuple[float, int]:
        of_stages = layers_by_stage(last)
        most = max(of_stages)
        return max(most, last + head) / (layers + head) + most / layers, sum(count * count for count in of_stages)

    return contiguous(layers_by_stage(min(range(1, layers - stages + 2), key=loss)))


def split_costs(read: Sequence[float], multiplied: Sequence[float], stages: int, head: float) -> list[range]:
    """Cuts layers of any costs into `stages` contiguous ranges, none empty. `read` are the weights of each layer that a
    step of decodes reads, `multiplied` those that a prompt's token is multiplied with; `head` are those of the head.

    Equal layers are cut by `split_layers`. Others are cut so that the costliest stage costs the least, where the cost
    of a layer is the sum of its shares of all layers' costs for decodes and for prompts. Raises ValueError as
    `split_layers` does.
    """
    layers = len(read)
    if len(set(zip(read, multiplied, strict=True))) <= 1:
        return split_layers(layers, stages, head / read[0] if layers else 0.0)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    decodes, prompts = sum(read) + head, sum(multiplied)
    until = [0.0, *itertools.accumulate(r / decodes + m / prompts for r, m in zip(read, multiplied, strict=True))]

    def cost(begin: int, end: int) -> float:
        return until[end] - until[begin] + (head / decodes if end == layers else 0.0)

    # The least cost of the costliest stage, by the number of stages and of layers in them, with the last stage's begin.
    best = {(1, end): (cost(0, end), 0) for end in range(1, layers + 1)}
    for count in range(2, stages + 1):
        for end in range(count, layers + 1):
            best[count, end] = min(
                (max(best[count - 1, begin][0], cost(begin, end)), begin) for begin in range(count - 1, end)
            )
    ranges, end = [], layers
    for count in range(stages, 0, -1):
        begin = best[count, end][1]
        ranges.append(range(begin, end))
        end = begin
    return ranges[::-1]


def contiguous(sizes: Sequence[int]) -> list[range]:
    """Consecutive ranges with the given numbers of layers."""
    ends = itertools.accumulate(sizes, initial=0)
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]
