"""A tensor of a recurrent layer in a checkpoint, and the ranges of its elements that a rank needs."""

from typing import NamedTuple


class RecurrentTensor(NamedTuple):
    """A tensor of a checkpoint, of `shape`. Of its elements along `dim`, each range of `parts` goes to `parameter`,
    with its first element at the index given with the range."""

    parameter: str
    shape: tuple[int, ...]
    dim: int
    parts: tuple[tuple[int, range], ...]


def scaled(part: range, factor: int) -> range:
    """The elements of `part` where each has `factor` of them."""
    return range(part.start * factor, part.stop * factor)


def moved(part: range, by: int) -> range:
    """`part` in a tensor that has `by` elements before."""
    return range(part.start + by, part.stop + by)
