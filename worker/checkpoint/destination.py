"""Where one tensor of a checkpoint goes: which parts of it a rank has, and their places in a parameter."""

from typing import NamedTuple

import torch


class TensorPiece(NamedTuple):
    """The elements `kept` of a checkpoint's tensor along a dimension, which a parameter has from `first` on, multiplied
    by `factor`. `order` is that of `Rope.order` if they are heads, whose dimensions are rearranged."""

    first: int
    kept: range
    order: tuple[int, ...] | None = None
    factor: float = 1.0

    @property
    def row_order(self) -> torch.Tensor | None:
        """The order of the piece's rows; None if it is their own."""
        if self.order is None:
            return None
        return torch.arange(len(self.kept)).unflatten(0, (-1, len(self.order)))[:, list(self.order)].flatten()


class Destination(NamedTuple):
    """Destination of a checkpoint's tensor of `shape`: its `pieces` along `dim` go to `parameter`. `expert` is the
    index in the parameter's first dimension, which the tensor lacks: that of an expert, or of a norm's weights or
    biases; None if it has all dimensions."""

    parameter: str
    shape: tuple[int, ...]
    dim: int
    pieces: tuple[TensorPiece, ...]
    expert: int | None = None


def whole_tensor(parameter: str, shape: tuple[int, ...], kept: range | None = None) -> Destination:
    """The destination of a tensor of which the first elements of a parameter are the part `kept`, by default all."""
    return Destination(parameter, shape, 0, (TensorPiece(0, range(shape[0]) if kept is None else kept),))


def scaled(part: range, factor: int) -> range:
    """The elements of `part` where each has `factor` of them."""
    return range(part.start * factor, part.stop * factor)


def moved(part: range, by: int) -> range:
    """`part` in a tensor that has `by` elements before."""
    return range(part.start + by, part.stop + by)
