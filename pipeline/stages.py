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


def contiguous(sizes: Sequence[int]) -> list[range]:
    """Consecutive ranges with the given numbers of layers."""
    ends = itertools.accumulate(sizes, initial=0)
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]
