"""Which layers a stage holds."""

import itertools
from collections.abc import Sequence


def split_layers(layers: int, stages: int, head: float) -> list[range]:
    """Cuts layers, all alike, into `stages` contiguous ranges, none empty. The last stage has the head besides, which
    reads as many weights as `head` layers.

    A step of decodes reads all weights, and the head costs its part; of a prompt the head is computed for one token,
    and costs next to nothing. So no cut is best for both. This one has the least sum, over the two, of what the
    costliest stage costs relative to an even share; and of such cuts the one whose layers are the most even.

    Raises ValueError for fewer layers than stages or a negative head.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    if head < 0:
        raise ValueError("the head's cost is negative")
    if stages == 1:
        return [range(layers)]

    def counts(last: int) -> list[int]:
        """Layers of each stage where the last has so many."""
        each, more = divmod(layers - last, stages - 1)
        return [each + 1] * more + [each] * (stages - 1 - more) + [last]

    def loss(last: int) -> tuple[float, int]:
        of_stages = counts(last)
        most = max(of_stages)
        return max(most, last + head) / (layers + head) + most / layers, sum(count * count for count in of_stages)

    return contiguous(counts(min(range(1, layers - stages + 2), key=loss)))


def contiguous(counts: Sequence[int]) -> list[range]:
    """So many layers each, one stage after the other."""
    ends = itertools.accumulate(counts, initial=0)
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]
