"""The quantized formats of GGUF files, by ggml's names: what the bytes of a matrix are.

Source: the structures `block_*` in ggml-common.h and `dequantize_row_*` in ggml-quants.c of
https://github.com/ggml-org/llama.cpp. In a row, each block of columns has its scales and integers together.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.linear.block_weight import Blocks


class BlockFormat(NamedTuple):
    """A format. `columns`, `bytes`: of a block. `read` takes blocks, uint8 `[rows, blocks, bytes]`."""

    columns: int
    bytes: int
    read: Callable[[torch.Tensor], Blocks]


def read_blocks(kind: str, rows: torch.Tensor) -> Blocks:
    """The matrix of a format in `FORMATS`. rows: uint8 `[rows, bytes of a row]`."""
    own = FORMATS[kind]
    return own.read(rows.unflatten(1, (-1, own.bytes)))


def _halves(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """float16 numbers, one in each block, from byte `begin` on."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low halves of all bytes, then the high ones, along the last dimension."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """32 bits of each block from byte `begin` on, as 0 or 16."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((blocks[..., begin : begin + 4, None] >> bits & 1) << 4).flatten(-2)


def _q4_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[..., 2:]).flatten(1), 4, 32, _halves(blocks, 0), zero=8)


def _q4_1(blocks: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[..., 4:]).flatten(1), 4, 32, _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Blocks:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return Blocks(values.flatten(1), 8, 32, _halves(blocks, 0), zero=16)


def _q5_1(blocks: torch.Tensor) -> Blocks:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return Blocks(values.flatten(1), 8, 32, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(blocks[..., 2:].flatten(1) ^ 128, 8, 32, _halves(blocks, 0), zero=128)  # two's complement before


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 8 scales and the 8 minima of blocks of Q4_K and Q5_K, 6 bits each, uint8 `[rows, groups]`."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    least = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    return scales.flatten(1), least.flatten(1)


def _k_blocks(blocks: torch.Tensor, values: torch.Tensor, bits: int) -> Blocks:
    scales, least = _k_scales(blocks)
    return Blocks(
        values, bits, 32, _halves(blocks, 0), -_halves(blocks, 2), sub_scales=scales.view(torch.int8), sub_least=least
    )


def _q4_k(blocks: torch.Tensor) -> Blocks:
    values = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    return _k_blocks(blocks, values.flatten(1), 4)


def _q5_k(blocks: torch.Tensor) -> Blocks:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (blocks[..., None, 16:48] >> shifts & 1) << 4
    return _k_blocks(blocks, (low | high).flatten(1), 8)


def _q6_k(blocks: torch.Tensor) -> Blocks:
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))
    low = torch.cat((low & 15, low >> 4), dim=-2)  # 4 runs of 32 columns in each half of a block
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3) << 4
    sub_scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return Blocks((low | high).flatten(1), 8, 16, _halves(blocks, 208), sub_scales=sub_scales, zero=32)


FORMATS = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}
"""Formats whose matrices are kept as they are, by ggml's names."""
