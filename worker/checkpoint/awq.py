"""Matrices in AWQ (https://arxiv.org/abs/2306.00978), in the layout `gemm` of AutoAWQ, https://github.com/casper-hansen/AutoAWQ.

| tensor | shape | content |
| --- | --- | --- |
| `qweight` | int32 `[in, out / 8]` | integers of 4 bits |
| `qzeros` | int32 `[in / group, out / 8]` | zeros, likewise |
| `scales` | float16 `[in / group, out]` | |

A word has eight neighbours along `out`, not in their order: from its low bits on, numbers 0, 2, 4, 6, 1, 3, 5 and 7.
"""

from collections.abc import Iterator

import torch

from worker.checkpoint.packed_matrix import PackedMatrix, PackedTensor
from worker.checkpoint.tensors import ModelTensor, StoredTensor, transposed
from worker.models.quantization import Quantization

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of the eight in a word


def model_tensors(stored: list[StoredTensor], said: Quantization, device: torch.device) -> Iterator[ModelTensor]:
    """`worker.checkpoint.formats.CheckpointFormat` of `quant_method: awq`. Raises ValueError if a matrix lacks zeros or
    scales."""
    by_name = {tensor.name: tensor for tensor in stored}
    for tensor in stored:
        module, _, kind = tensor.name.rpartition(".")
        if f"{module}.qweight" not in by_name or kind == "bias":
            yield ModelTensor(tensor.name, tensor.shape, tensor.read)
        elif kind == "qweight":
            columns, words = tensor.shape
            zeros, scales = (needed(by_name, module, part) for part in ("qzeros", "scales"))
            matrix = PackedMatrix(
                f"{module}.weight",
                (8 * words, columns),
                said.bits,
                said.group or columns,
                transposed(PackedTensor(tensor, said.bits, 1, _ORDER).read),
                transposed(scales.read),
                transposed(PackedTensor(zeros, said.bits, 1, _ORDER).read),
                device,
            )
            yield matrix.check_groups(scales, scales.shape[0]).model_tensor()


def needed(by_name: dict[str, StoredTensor], module: str, part: str) -> StoredTensor:
    """A tensor that a module's matrix needs. Raises ValueError if it is missing."""
    if f"{module}.{part}" not in by_name:
        raise ValueError(f"the checkpoint has {module}.qweight, and no {module}.{part}")
    return by_name[f"{module}.{part}"]
