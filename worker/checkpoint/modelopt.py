"""Matrices in the formats of NVIDIA's Model Optimizer (https://github.com/NVIDIA/Model-Optimizer) in FP8 and NVFP4.

| tensor | of | content |
| --- | --- | --- |
| `weight`, e4m3, with `weight_scale` | FP8 | as in `worker.checkpoint.fp8`; or of blocks, `[rows, 1, columns, 1]` |
| `weight`, uint8, with `weight_scale` and `weight_scale_2` | NVFP4 | as in `worker.checkpoint.nvfp4` |

Scales of activations, of keys and of values are left out, as in `worker.checkpoint.fp8`.
"""

from collections.abc import Iterator

import torch

from worker.checkpoint import fp8
from worker.checkpoint.compressed_tensors import needed
from worker.checkpoint.nvfp4 import Nvfp4Matrix
from worker.checkpoint.tensors import ModelTensor, StoredTensor
from worker.models.quantization import Quantization

_SCALES = ("weight_scale", "weight_scale_2")


def model_tensors(stored: list[StoredTensor], said: Quantization, device: torch.device) -> Iterator[ModelTensor]:
    """`worker.checkpoint.formats.CheckpointFormat` of `quant_method: modelopt`. The format of a matrix is found by its
    tensors. Raises ValueError for a matrix that lacks one, and for inputs that have scales of their own (AWQ)."""
    by_name = {tensor.name: tensor for tensor in stored}
    others = []
    for tensor in stored:
        module, _, kind = tensor.name.rpartition(".")
        weight = by_name.get(f"{module}.weight")
        if kind == "pre_quant_scale":
            raise ValueError(f"the checkpoint has {tensor.name}, a scale of each input (AWQ), which is not supported")
        if weight is None or weight.dtype != "U8" or kind not in ("weight", *_SCALES):
            others.append(_flat(tensor))
        elif kind == "weight":
            scales, factor = (needed(by_name, module, part) for part in _SCALES)
            yield Nvfp4Matrix(tensor.name, tensor, scales, float(factor.whole()), device).model_tensor()
    yield from fp8.model_tensors(others, said, device)


def _flat(tensor: StoredTensor) -> StoredTensor:
    """Scales of blocks without the sizes of one between the others."""
    shape = tensor.shape
    if not tensor.name.endswith(".weight_scale") or len(shape) != 4 or shape[1::2] != (1, 1):
        return tensor
    return tensor._replace(shape=shape[::2], read=lambda dim, part: tensor.read(2 * dim, part)[:, 0, :, 0])
