"""Matrices in FP8 (e4m3, https://arxiv.org/abs/2209.05433), with their scales in a tensor of its own.

| name of the scales | shape | of |
| --- | --- | --- |
| `weight_scale_inv` | `[rows / 128, columns / 128]`, rounded up | blocks |
| `weight_scale` | `[]` or `[1]`; `[rows]` or `[rows, 1]`; that of blocks | all weights; each row; blocks |

Blocks are those of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3.2). All scales are factors. Those of
activations (`input_scale`) and of keys and values are left out: activations get scales of their own in every step, and
the KV cache is in the activations' dtype.
"""

from collections.abc import Iterator

import torch

from kernels.linear.fp8_linear import GROUP, Fp8Weight
from worker.checkpoint.tensors import ModelTensor, StoredTensor
from worker.models.quantization import Quantization

DTYPE = "F8_E4M3"
_SCALES = ("weight_scale_inv", "weight_scale")
_LEFT_OUT = ("input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale")


class Fp8Matrix:
    """A matrix of a checkpoint, of which parts can be read. `block`: rows and columns that share a scale; None if a
    scale is that of a row, or of all."""

    def __init__(
        self, weight: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None, device: torch.device
    ) -> None:
        """Raises ValueError if the scales do not belong to the matrix."""
        self.name, self.shape = weight.name, weight.shape
        self._read, self._scales, self._device = weight.read, scales, device
        rows, columns = weight.shape
        of_rows = scales.shape in ((), (1,), (1, 1), (rows,), (rows, 1))
        if not of_rows and (block is None or scales.shape != (-(-rows // block[0]), -(-columns // block[1]))):
            what = "a scale for all or for each row" if block is None else f"blocks of {block[0]} by {block[1]}"
            raise ValueError(
                f"{scales.name} has shape {scales.shape}, which is not that of {what} of {weight.name}, {weight.shape}"
            )
        self._block = (1, columns) if of_rows or block is None else block

    @property
    def has_groups(self) -> bool:
        """Whether a row has several scales."""
        return self._block[1] < self.shape[1]

    @property
    def can_be_kept(self) -> bool:
        """Whether products in 8 bits have such scales: of rows, or of groups of `GROUP` columns."""
        return not self.has_groups or self._block[1] % GROUP == 0

    def dense(self, dim: int, part: range) -> torch.Tensor:
        """The weights of a part, float32."""
        scales, columns = self._rows_of_scales(dim, part), self._block[1]
        own = part if dim == 1 else range(self.shape[1])
        if scales.shape[1] > 1:
            scales = scales[:, torch.arange(own.start, own.stop, device=self._device) // columns]
        return self._read(dim, part).to(self._device).float().mul_(scales)

    def kept(self, dim: int, part: range) -> Fp8Weight:
        """The part in 8 bits, with the scales of its rows or of their groups."""
        scales, columns = self._rows_of_scales(dim, part), self._block[1]
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(columns // GROUP, dim=1)[:, : -(-self.shape[1] // GROUP)]
            if dim == 1:
                if part.start % GROUP or (part.stop % GROUP and part.stop != self.shape[1]):
                    raise ValueError(
                        f"{self.name} has scales for groups of {GROUP} columns, which this number of ranks would cut "
                        f"(columns {part.start} to {part.stop}): choose another tp, or set dequantize"
                    )
                scales = scales[:, part.start // GROUP : -(-part.stop // GROUP)]
        return Fp8Weight(self._read(dim, part).to(self._device), scales.contiguous())

    def _rows_of_scales(self, dim: int, part: range) -> torch.Tensor:
        """Scales of the rows of a part, float32 `[rows, 1]` or `[rows, blocks of columns]`."""
        rows = part if dim == 0 else range(self.shape[0])
        scales = self._scales.whole().to(self._device).float()
        if scales.numel() == 1:
            return scales.view(1, 1).expand(len(rows), 1)
        index = torch.arange(rows.start, rows.stop, device=self._device) // self._block[0]
        return scales.view(len(scales), -1)[index]


def model_tensors(stored: list[StoredTensor], said: Quantization, device: torch.device) -> Iterator[ModelTensor]:
    """`worker.checkpoint.formats.CheckpointFormat` of `quant_method: fp8`. Matrices without scales are numbers."""
    by_name = {tensor.name: tensor for tensor in stored}
    for tensor in stored:
        module, _, kind = tensor.name.rpartition(".")
        if kind in _LEFT_OUT or (kind in _SCALES and f"{module}.weight" in by_name):
            continue
        if not tensor.dtype.startswith("F8"):
            yield ModelTensor(tensor.name, tensor.shape, tensor.read)
            continue
        yield matrix(tensor, by_name, said, device)


def matrix(
    weight: StoredTensor, by_name: dict[str, StoredTensor], said: Quantization, device: torch.device
) -> ModelTensor:
    """A matrix in 8 bits, with its scales from `by_name`. Raises ValueError if there are none, or for another dtype."""
    if weight.dtype != DTYPE or len(weight.shape) != 2:
        raise ValueError(f"{weight.name} is {weight.dtype} of shape {weight.shape}: no matrix in {DTYPE}")
    module = weight.name.removesuffix("weight")
    scales = next((by_name[module + kind] for kind in _SCALES if module + kind in by_name), None)
    if scales is None:
        raise ValueError(f"the checkpoint has no scales for {weight.name}, which is in 8 bits: {module}weight_scale")
    own = Fp8Matrix(weight, scales, said.block, device)
    kept = own.kept if own.can_be_kept else None
    return ModelTensor(weight.name, weight.shape, own.dense, fp8=kept, has_groups=own.has_groups)
