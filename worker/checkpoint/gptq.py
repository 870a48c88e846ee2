"""Matrices in GPTQ (https://arxiv.org/abs/2210.17323), in the layouts of AutoGPTQ and https://github.com/ModelCloud/GPTQModel.

| tensor | shape, with n = 32 / bits | content |
| --- | --- | --- |
| `qweight` | int32 `[in / n, out]` | n integers, neighbours along `in` |
| `qzeros` | int32 `[groups, out / n]` | n zeros, neighbours along `out`; less one, but for `gptq_v2` |
| `scales` | float16 `[groups, out]` | |
| `g_idx` | int32 `[in]` | the group of each input, which need not be one of neighbours (`desc_act`) |
"""

from collections.abc import Iterator

import torch

from worker.checkpoint.awq import needed
from worker.checkpoint.packed_matrix import PackedMatrix, PackedTensor, unpacked
from worker.checkpoint.tensors import ModelTensor, Read, StoredTensor, transposed
from worker.models.quantization import Quantization


def model_tensors(stored: list[StoredTensor], said: Quantization, device: torch.device) -> Iterator[ModelTensor]:
    """`worker.checkpoint.formats.CheckpointFormat` of `quant_method: gptq`. Biases of zeros are left out: AutoGPTQ
    writes one for each matrix. Raises ValueError if a matrix lacks zeros or scales."""
    by_name = {tensor.name: tensor for tensor in stored}
    for tensor in stored:
        module, _, kind = tensor.name.rpartition(".")
        if f"{module}.qweight" not in by_name:
            yield ModelTensor(tensor.name, tensor.shape, tensor.read)
        elif kind == "bias":
            if tensor.whole().any():
                yield ModelTensor(tensor.name, tensor.shape, tensor.read)
        elif kind == "qweight":
            words, rows = tensor.shape
            columns = words * 32 // said.bits
            group = said.group or columns
            zeros, scales = (needed(by_name, module, part) for part in ("qzeros", "scales"))
            matrix = PackedMatrix(
                f"{module}.weight",
                (rows, columns),
                said.bits,
                group,
                transposed(PackedTensor(tensor, said.bits, 0).read),
                transposed(scales.read),
                _zeros(zeros, said),
                device,
                _groups(by_name.get(f"{module}.g_idx"), group),
            )
            yield matrix.check_groups(scales, scales.shape[0]).model_tensor()


def _groups(index: StoredTensor | None, group: int) -> torch.Tensor | None:
    """The group of each column; None if groups are of neighbours."""
    if index is None:
        return None
    groups = index.whole().long()
    return None if torch.equal(groups, torch.arange(len(groups)) // group) else groups


def _zeros(zeros: StoredTensor, said: Quantization) -> Read:
    if said.is_v2:
        return transposed(PackedTensor(zeros, said.bits, 1).read)
    ones = sum(1 << shift for shift in range(0, 32, said.bits))

    def read(dim: int, part: range) -> torch.Tensor:
        # Writers take one from each word's elements together, so a borrow is given back.
        words = zeros.whole().long().bitwise_and(0xFFFFFFFF).add_(ones)
        values = unpacked(words, said.bits, 1).t()
        return values[part.start : part.stop] if dim == 0 else values[:, part.start : part.stop]

    return read
