"""Matrices in the formats of compressed-tensors (https://github.com/vllm-project/compressed-tensors) that have 8 bits,
or several integers in a word.

| format | tensor | content |
| --- | --- | --- |
| `float-quantized` | `weight` | e4m3 `[out, in]` |
| | `weight_scale` | as in `worker.checkpoint.fp8` |
| `int-quantized` | `weight` | int8 `[out, in]` |
| | `weight_scale` | `[1]`, `[out]` or `[out, groups]` |
| `naive-quantized` | | either of them |
| `pack-quantized` | `weight_packed` | int32 `[out, in / n]`: n integers, plus half of their range |
| | `weight_scale` | `[out, groups]` |
| | `weight_shape` | the two sizes |
| | `weight_zero_point` | int32 `[out / n, groups]`: n zeros, likewise; missing if all are half of the range |
| | `weight_g_idx` | the group of each column; missing or -1 if groups are of neighbours |
| `nvfp4-pack-quantized` | `weight_packed`, `weight_scale`, `weight_global_scale` | as in `worker.checkpoint.nvfp4` |

Activations, which such a checkpoint may have in 8 bits too, are in 16 or 32 bits, but for products in FP8.
"""

from collections.abc import Iterator
from functools import partial

import torch

from worker.checkpoint import fp8
from worker.checkpoint.nvfp4 import Nvfp4Matrix
from worker.checkpoint.packed_matrix import PackedMatrix, PackedTensor
from worker.checkpoint.tensors import ModelTensor, Read, StoredTensor
from worker.models.quantization import Quantization

_PARTS = (
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_packed",
    "weight_global_scale",
)
_LEFT_OUT = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
)


def model_tensors(stored: list[StoredTensor], said: Quantization, device: torch.device) -> Iterator[ModelTensor]:
    """`worker.checkpoint.formats.CheckpointFormat` of `quant_method: compressed-tensors`. The format of a matrix is
    found by its tensors. Raises ValueError for a matrix that lacks one."""
    by_name = {tensor.name: tensor for tensor in stored}
    for tensor in stored:
        module, _, kind = tensor.name.rpartition(".")
        if kind == "weight_packed" and tensor.dtype == "U8":
            scales, factor = (needed(by_name, module, part) for part in ("weight_scale", "weight_global_scale"))
            name = f"{module}.weight"
            yield Nvfp4Matrix(name, tensor, scales, 1.0 / float(factor.whole()), device).model_tensor()
        elif kind == "weight_packed":
            yield _packed(tensor, module, by_name, device).model_tensor()
        elif kind in _LEFT_OUT or kind in _PARTS:
            continue
        elif tensor.dtype.startswith("F8"):
            yield fp8.matrix(tensor, by_name, said, device)
        elif tensor.dtype == "I8":
            yield _in_8_bits(tensor, module, by_name, said, device).model_tensor()
        else:
            yield ModelTensor(tensor.name, tensor.shape, tensor.read)


def _packed(words: StoredTensor, module: str, by_name: dict[str, StoredTensor], device: torch.device) -> PackedMatrix:
    rows, columns = (int(size) for size in needed(by_name, module, "weight_shape").whole())
    bits = 32 // -(-columns // words.shape[1])
    scales = needed(by_name, module, "weight_scale")
    group = -(-columns // scales.shape[1])
    index, zeros = (by_name.get(f"{module}.{part}") for part in ("weight_g_idx", "weight_zero_point"))
    groups = None if index is None else index.whole().long()
    if groups is not None and (int(groups[0]) < 0 or torch.equal(groups, torch.arange(columns) // group)):
        groups = None
    return PackedMatrix(
        f"{module}.weight",
        (rows, columns),
        bits,
        group,
        partial(_within, PackedTensor(words, bits, 1).read, columns),
        scales.read,
        1 << (bits - 1) if zeros is None else PackedTensor(zeros, bits, 0).read,
        device,
        groups,
    )


def _within(read: Read, columns: int, dim: int, part: range) -> torch.Tensor:
    """A part without the elements that fill the last words."""
    return read(dim, part)[:, :columns] if dim == 0 else read(dim, part)


def _in_8_bits(
    weight: StoredTensor, module: str, by_name: dict[str, StoredTensor], said: Quantization, device: torch.device
) -> PackedMatrix:
    rows, columns = weight.shape
    scales = needed(by_name, module, "weight_scale")
    if f"{module}.weight_zero_point" in by_name and by_name[f"{module}.weight_zero_point"].whole().any():
        raise ValueError(f"{weight.name} has integers of 8 bits with zeros, which are not supported")
    group = columns if said.block is None else said.block[1]
    if scales.shape not in ((1,), (rows,), (rows, -(-columns // group))) or (said.block or (1, 1))[0] != 1:
        raise ValueError(f"{scales.name} has shape {scales.shape}, and {weight.name} has {weight.shape}")
    return PackedMatrix(
        weight.name,
        weight.shape,
        8,
        group,
        lambda dim, part: weight.read(dim, part).view(torch.uint8) ^ 128,
        lambda dim, part: _of_rows(scales.whole(), rows)[part.start : part.stop],
        128,
        device,
    )


def _of_rows(scales: torch.Tensor, rows: int) -> torch.Tensor:
    return scales.expand(rows).unsqueeze(1) if scales.ndim == 1 else scales


def needed(by_name: dict[str, StoredTensor], module: str, part: str) -> StoredTensor:
    if f"{module}.{part}" not in by_name:
        raise ValueError(f"the checkpoint has a quantized {module}, and no {module}.{part}")
    return by_name[f"{module}.{part}"]
