"""Matrices of integers with scales for groups of columns, several integers in a number of 32 bits."""

from dataclasses import dataclass

import torch

from kernels.linear.block_weight import Blocks
from worker.checkpoint.tensors import ModelTensor, Read, StoredTensor

_WORD_BITS = 32
_GROUP = 32  # columns of a group in `Blocks`


class PackedTensor:
    """A tensor of integers without signs, of which parts can be read. Along `packed`, the dimension of the words, each
    word has some elements, from its low bits on, in their `order` or one after the other."""

    def __init__(self, words: StoredTensor, bits: int, packed: int, order: tuple[int, ...] | None = None) -> None:
        self.words = words
        self._bits, self._packed, self._order = bits, packed, order

    def read(self, dim: int, part: range) -> torch.Tensor:
        """Elements of a part along a dimension, uint8. Those that only fill the last word count, too."""
        if dim != self._packed:
            return unpacked(self.words.read(dim, part), self._bits, self._packed, self._order)
        count = _WORD_BITS // self._bits
        first = part.start // count
        values = unpacked(self.words.read(dim, range(first, -(-part.stop // count))), self._bits, dim, self._order)
        return values.narrow(dim, part.start - first * count, len(part))


def unpacked(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """The elements of words along `dim`, uint8. words: int32, or int64 with 32 bits. `order`: the place of each element
    in a word, by bits."""
    count = _WORD_BITS // bits
    shifts = bits * torch.tensor(order or range(count), dtype=words.dtype, device=words.device)
    shape = [1] * (words.ndim + 1)
    shape[dim + 1] = count
    return (words.unsqueeze(dim + 1) >> shifts.view(shape) & (1 << bits) - 1).to(torch.uint8).flatten(dim, dim + 1)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix `[rows, columns]`: a weight is `scale * (integer - zero)`, with scale and zero those of its group.

    | field | meaning |
    | --- | --- |
    | `bits` | of an integer |
    | `group` | columns of a group |
    | `integers` | reads uint8 `[rows, columns]` |
    | `scales` | reads floating point `[rows, groups]` |
    | `zeros` | reads uint8 or int16 `[rows, groups]`, or the zero of all |
    | `groups` | the group of each column, int64 `[columns]`, if groups are not of neighbours |
    """

    name: str
    shape: tuple[int, ...]
    bits: int
    group: int
    integers: Read
    scales: Read
    zeros: Read | int
    device: torch.device
    groups: torch.Tensor | None = None

    def check_groups(self, scales: StoredTensor, count: int) -> "PackedMatrix":
        """The matrix itself. Raises ValueError unless `count`, the groups in the tensor of scales, is right."""
        expected = -(-self.shape[1] // self.group) if self.groups is None else int(self.groups.max()) + 1
        if count != expected:
            raise ValueError(
                f"{scales.name} has {count} groups: {self.name} has {self.shape[1]} columns in groups of {self.group}, "
                f"which makes {expected}"
            )
        return self

    def model_tensor(self) -> ModelTensor:
        """The matrix as a model has it. Groups of 32 columns, or of multiples of that, can be kept as blocks."""
        has_blocks = self.groups is None and self.group % _GROUP == 0 and self.shape[1] % self.group == 0
        return ModelTensor(self.name, self.shape, self.dense, self.blocks if has_blocks else None)

    def dense(self, dim: int, part: range) -> torch.Tensor:
        """The weights of a part, float32."""
        rows = (0, part if dim == 0 else range(self.shape[0]))
        own = part if dim == 1 else range(self.shape[1])
        index = torch.arange(own.start, own.stop) // self.group if self.groups is None else self.groups[list(own)]
        index = index.to(self.device)
        scales = self.scales(*rows).to(self.device).float()[:, index]
        values = self.integers(dim, part).to(self.device).float()
        if isinstance(self.zeros, int):
            return values.sub_(self.zeros).mul_(scales)
        return values.sub_(self.zeros(*rows).to(self.device)[:, index]).mul_(scales)

    def blocks(self, dim: int, part: range) -> Blocks:
        """The part with the integers as they are. Raises ValueError if it begins or ends inside of 32 columns."""
        rows = (0, part if dim == 0 else range(self.shape[0]))
        scales, zeros = self.scales(*rows), self.zeros if isinstance(self.zeros, int) else self.zeros(*rows)
        if dim == 1 and len(part) < self.shape[1]:
            if part.start % _GROUP or part.stop % _GROUP:
                raise ValueError(
                    f"{self.name} is kept in groups of {_GROUP} columns, which this number of ranks would cut (columns "
                    f"{part.start} to {part.stop}): choose another tp, or set dequantize"
                )
            # Each 32 columns get a scale of their own: ranks may cut the checkpoint's groups.
            index = torch.arange(part.start, part.stop, _GROUP) // self.group
            scales, zeros = scales[:, index], zeros if isinstance(zeros, int) else zeros[:, index]
        if isinstance(zeros, torch.Tensor) and (zeros == zeros[0, 0]).all():
            zeros = int(zeros[0, 0])
        values = self.integers(dim, part)
        if isinstance(zeros, int):
            scales = scales if scales.dtype == torch.float16 else scales.float()
            return Blocks(values, self.bits, _GROUP, scales, zero=zeros)
        # In float32, scale * integer + least is the weight exactly where scales have 16 bits.
        scales = scales.float()
        return Blocks(values, self.bits, _GROUP, scales, -scales * zeros)
