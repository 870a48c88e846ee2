"""Matrices in NVFP4: numbers of 4 bits (e2m1), a scale in e4m3 for each 16 of a row, and a factor for the matrix.

| tensor | ModelOpt | compressed-tensors, `nvfp4-pack-quantized` |
| --- | --- | --- |
| bytes of two numbers, the first in the low bits, uint8 `[rows, columns / 2]` | `weight` | `weight_packed` |
| scales, e4m3 `[rows, columns / 16]` | `weight_scale` | `weight_scale` |
| factor, float32 `[]` or `[1]` | `weight_scale_2` | 1 / `weight_global_scale` |

A number is worth its code times its scale times the factor
(https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/).
"""

import torch

from worker.checkpoint.e2m1 import numbers
from worker.checkpoint.tensors import ModelTensor, StoredTensor

GROUP = 16


class Nvfp4Matrix:
    """A matrix of a checkpoint, of which parts can be read."""

    def __init__(
        self, name: str, packed: StoredTensor, scales: StoredTensor, factor: float, device: torch.device
    ) -> None:
        """Raises ValueError if the scales do not belong to the matrix."""
        rows, half = packed.shape
        if packed.dtype != "U8" or scales.dtype != "F8_E4M3" or scales.shape != (rows, -(-2 * half // GROUP)):
            raise ValueError(
                f"{packed.name} is {packed.dtype} of shape {packed.shape} and {scales.name} {scales.dtype} of shape "
                f"{scales.shape}: no matrix in NVFP4"
            )
        self.name, self.shape = name, (rows, 2 * half)
        self._packed, self._scales, self._factor, self._device = packed.read, scales.read, factor, device

    def dense(self, dim: int, part: range) -> torch.Tensor:
        """The weights of a part, float32."""
        if dim == 0:
            return self._numbers(0, part, part)
        groups = range(part.start // GROUP, -(-part.stop // GROUP))
        whole = self._numbers(1, range(groups.start * GROUP // 2, min(groups.stop * GROUP, self.shape[1]) // 2), groups)
        first = groups.start * GROUP
        return whole[:, part.start - first : part.stop - first]

    def _numbers(self, dim: int, bytes_: range, groups: range) -> torch.Tensor:
        """The numbers of whole groups: those of parts of the bytes, and of the scales, along a dimension."""
        packed = self._packed(dim, bytes_).to(self._device)
        scales = self._scales(dim, groups).to(self._device).float() * self._factor
        own = numbers(packed)
        return own * scales.repeat_interleave(GROUP, dim=1)[:, : own.shape[1]]

    def model_tensor(self) -> ModelTensor:
        """The matrix for the model. It is multiplied out."""
        return ModelTensor(self.name, self.shape, self.dense)
