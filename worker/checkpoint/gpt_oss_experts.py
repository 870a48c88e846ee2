"""The experts in gpt-oss's checkpoints, given as those of other families: matrices `[experts, out, in]`, gates first.

| layout | gates and ups, `[experts, …]` | down |
| --- | --- | --- |
| as published, in MXFP4 | `[2 * size, hidden / 32, 16]`, rows in turns: a gate, its up | `[hidden, size / 32, 16]` |
| as transformers saves them | `[hidden, 2 * size]`, columns in turns | `[size, hidden]` |

Biases have gates and ups in turns in both. MXFP4 (Open Compute Project, Microscaling Formats 1.0) has numbers of 4 bits
(`worker.checkpoint.e2m1`). Blocks of 32 share a scale, the power of two of a byte less 127. These numbers
times their scales are exact in bfloat16 and float32. Ranks have whole blocks (`ExpertsConfig.unit`).
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from kernels.experts.mxfp4_weight import GROUP
from worker.checkpoint.e2m1 import numbers
from worker.checkpoint.tensors import ModelTensor, Read, ReadMxfp4, StoredTensor

_SCALE_BIAS = 127


def arranged(tensors: Iterable[StoredTensor], device: torch.device, dtype: torch.dtype) -> Iterator[ModelTensor]:
    """The tensors of a checkpoint, with experts as in other families' checkpoints. MXFP4 is multiplied out on `device`,
    to `dtype`, as it is read. Raises ValueError for blocks without scales, and the reverse."""
    halves: dict[str, tuple[str, tuple[int, ...], Read]] = {}  # of matrices in MXFP4, until the other one comes
    for name, shape, _, read in tensors:
        matrix, _, half = name.rpartition("_")
        if half in ("blocks", "scales") and ".mlp.experts." in name:
            if matrix not in halves:
                halves[matrix] = half, shape, read
                continue
            _, other_shape, other_read = halves.pop(matrix)
            blocks, scales = (read, other_read) if half == "blocks" else (other_read, read)
            experts, rows, groups = (shape if half == "scales" else other_shape)[:3]
            reader = _gate_up_of_blocks if matrix.endswith("gate_up_proj") else _down_of_blocks
            kept = partial(reader, blocks, scales, rows // 2)
            shape = experts, rows, groups * GROUP
            yield ModelTensor(matrix, shape, partial(multiplied_out, kept, device, dtype), mxfp4=kept)
        elif name.endswith(".mlp.experts.gate_up_proj"):
            experts, hidden, rows = shape
            yield ModelTensor(name, (experts, rows, hidden), partial(_gate_up, read, rows // 2))
        elif name.endswith(".mlp.experts.gate_up_proj_bias"):
            yield ModelTensor(name, shape, partial(_gate_up_bias, read, shape[1] // 2))
        elif name.endswith(".mlp.experts.down_proj"):
            experts, size, hidden = shape
            yield ModelTensor(name, (experts, hidden, size), partial(_down, read))
        else:
            yield ModelTensor(name, shape, read)
    if halves:
        name, (half, *_) = next(iter(halves.items()))
        raise ValueError(f"the checkpoint has {name}_{half}, and not the other half of that matrix in MXFP4")


def dequantized(blocks: torch.Tensor, scales: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Matrices in MXFP4 as numbers: `[experts, rows, 32 * groups]` of `dtype` on `device`.

    blocks: uint8 `[experts, rows, groups, 16]`. scales: uint8 `[experts, rows, groups]`.
    """
    experts, rows, groups = scales.shape
    out = torch.empty(experts, rows, groups * GROUP, dtype=dtype, device=device)
    # One expert at a time: codes and float32 take ten times the memory of the blocks.
    for own, packed, powers in zip(out, blocks, scales, strict=True):
        exponents = powers.to(device).int() - _SCALE_BIAS
        own.copy_(torch.ldexp(numbers(packed.to(device)), exponents[..., None]).flatten(1))
    return out


def multiplied_out(kept: ReadMxfp4, device: torch.device, dtype: torch.dtype, dim: int, part: range) -> torch.Tensor:
    """The numbers of a part of a matrix in MXFP4, of `dtype` on `device`."""
    return dequantized(*kept(dim, part), device, dtype)


def _turns(part: range, size: int) -> tuple[range, int]:
    """Rows of gates and ups in turns that hold `part` of the rows with gates first, and which of each two they are."""
    second = int(part.start >= size)
    return range(2 * (part.start - second * size), 2 * (part.stop - second * size)), second


def _apart(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows of gates and ups in turns as gates, then ups."""
    return torch.cat(tuple(rows.unflatten(dim, (-1, 2)).unbind(dim + 1)), dim)


def _gate_up(read: Read, size: int, dim: int, part: range) -> torch.Tensor:
    if dim == 0:  # whole experts
        return _apart(read(0, part).transpose(1, 2), 1)
    columns, second = _turns(part, size)
    return read(2, columns)[:, :, second::2].transpose(1, 2)


def _gate_up_bias(read: Read, size: int, dim: int, part: range) -> torch.Tensor:
    if dim == 0:
        return _apart(read(0, part), 1)
    columns, second = _turns(part, size)
    return read(dim, columns)[:, second::2]


def _down(read: Read, dim: int, part: range) -> torch.Tensor:
    return read((0, 2, 1)[dim], part).transpose(1, 2)


def _gate_up_of_blocks(
    blocks: Read, scales: Read, size: int, dim: int, part: range
) -> tuple[torch.Tensor, torch.Tensor]:
    if dim == 0:
        return _apart(blocks(0, part), 1), _apart(scales(0, part), 1)
    rows, second = _turns(part, size)
    return blocks(1, rows)[:, second::2], scales(1, rows)[:, second::2]


def _down_of_blocks(blocks: Read, scales: Read, _: int, dim: int, part: range) -> tuple[torch.Tensor, torch.Tensor]:
    if dim == 2:
        part = range(part.start // GROUP, -(-part.stop // GROUP))
    return blocks(dim, part), scales(dim, part)
