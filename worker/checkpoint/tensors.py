"""The tensors of a checkpoint, of which parts can be read: as its files have them, and as a model has them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernels.linear.block_weight import Blocks
from kernels.linear.fp8_linear import Fp8Weight

Read = Callable[[int, range], torch.Tensor]
"""`read(dim, part)` reads only that part of a tensor along a dimension."""

ReadBlocks = Callable[[int, range], Blocks]
"""Reads a part of a matrix along a dimension, in blocks as its format has it. Raises ValueError if the part would cut
a block."""

ReadFp8 = Callable[[int, range], Fp8Weight]
"""Reads a part of a matrix along a dimension, in 8 bits as its format has it. The part has whole groups of columns if
there is a scale for each."""


ReadMxfp4 = Callable[[int, range], tuple[torch.Tensor, torch.Tensor]]
"""Reads a part of a layer's experts along a dimension, in MXFP4: blocks, uint8 `[experts, rows, groups, 16]`, and the
exponents of their scales, uint8 `[experts, rows, groups]`. The part has whole groups of columns."""


class StoredTensor(NamedTuple):
    """A tensor as a file has it. `dtype` has the name that safetensors gives it, as `F8_E4M3`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Read

    def whole(self) -> torch.Tensor:
        """All of the tensor."""
        return self.read(0, range(self.shape[0])) if self.shape else self.read(0, range(1))


class ModelTensor(NamedTuple):
    """A tensor as the model has it, whatever the format of its numbers. `read` gives floating-point numbers; `blocks`,
    `fp8` and `mxfp4` give the format's own, if it can be kept. `has_groups`: whether scales in 8 bits are those of
    groups of columns."""

    name: str
    shape: tuple[int, ...]
    read: Read
    blocks: ReadBlocks | None = None
    fp8: ReadFp8 | None = None
    has_groups: bool = False
    mxfp4: ReadMxfp4 | None = None


def cut(tensor: Any, dim: int, part: range) -> torch.Tensor:
    """Cuts a part along a dimension out of a tensor, or of a file's slice, which is read only then."""
    return tensor[(slice(None),) * dim + (slice(part.start, part.stop),)]


def transposed(read: Read, dims: int = 2) -> Read:
    """Reads parts of the transposed matrix, or of matrices `[n, out, in]`."""
    swapped = {dims - 1: dims - 2, dims - 2: dims - 1}
    return lambda dim, part: read(swapped.get(dim, dim), part).transpose(-1, -2)
