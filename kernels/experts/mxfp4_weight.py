"""Experts' weights in MXFP4 (Open Compute Project, Microscaling Formats 1.0), in the order in which kernels read them.

A number is one of e2m1, times a power of two that it shares with its 32 neighbours. All these numbers are exact in
bfloat16, in which the kernels multiply. The order of the bits is made once, as weights load, so that a word gives pairs
of bfloat16 by shifts and masks (`kernels.experts.mxfp4_numbers`).
"""

from functools import cache
from typing import NamedTuple

import torch

GROUP = 32
"""Columns that share a scale."""

CHUNK = 4 * GROUP
"""Columns whose words are next to each other."""

WORDS = 16
"""Words of a row's chunk."""

BYTES = 4.25 / 8
"""Of a weight, with its part of a scale."""

TURN = 8
"""Rows of gates, which as many of their ups follow."""

_BIAS = 127  # of a scale's exponent
_DECODED = 126  # power of two by which `kernels.experts.mxfp4_numbers` makes numbers too small
_LARGEST = 128  # the largest exponent of a scale, with its bias, that is kept
_SIGNS, _OTHERS = (15, 12, 13, 14), (6, 3, 0, 9)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of e2m1, by code; with the sign's bit, 8, they are negative."""

E2M1_SIZE = 2.93
"""Of random bits as e2m1: the root of the mean square."""


class Mxfp4Weight(NamedTuple):
    """A weight `[experts, rows, columns]` in MXFP4, in chunks of `CHUNK` columns, the last of them filled with zeros.

    words: int32 `[experts, chunks, rows, WORDS]`. Word w has two numbers of each of the chunk's four groups, those of
    the columns 2 * w and 2 * w + 1 of the group: the first of the two in its lower half, the other in its upper half,
    at these bits of the half:

    | group | sign | the other three |
    | --- | --- | --- |
    | 0 | 15 | from 6 on |
    | 1 | 12 | from 3 on |
    | 2 | 13 | from 0 on |
    | 3 | 14 | from 9 on |

    scales: int32 `[experts, chunks, rows]`, a byte for each group, that of the first one in the low bits: the exponent,
    with bfloat16's bias, of the group's scale times 2 ** 126.

    If it has gates and ups, these are in turns of `TURN` rows: a thread then has the outputs of both.
    """

    words: torch.Tensor
    scales: torch.Tensor


def chunks_of(columns: int) -> int:
    """Number of chunks of a row."""
    return -(-columns // CHUNK)


def packed(blocks: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in MXFP4 as words, int32 `[chunks, rows, WORDS]`, and scales, int32 `[chunks, rows]`.

    blocks: uint8 `[rows, groups, 16]`, two numbers a byte, the first in the low bits. exponents: uint8 `[rows,
    groups]`, with a bias of 127. Raises ValueError for scales above 2, with which the kernels' bfloat16 would overflow.
    """
    if bool((exponents > _LARGEST).any()):
        raise ValueError("experts in MXFP4 have a scale above 2, which products on GPUs lack: set dequantize")
    missing = -exponents.shape[1] % (CHUNK // GROUP)
    by_chunk = torch.nn.functional.pad(blocks, (0, 0, 0, missing)).unflatten(1, (-1, CHUNK // GROUP)).transpose(0, 1)
    scales = torch.nn.functional.pad(exponents, (0, missing)).unflatten(1, (-1, CHUNK // GROUP)).transpose(0, 1)
    words, factors = torch.zeros_like(by_chunk[:, :, 0], dtype=torch.int32), torch.zeros_like(scales[:, :, 0]).int()
    for group, table in enumerate(_tables(blocks.device)):
        words |= table[by_chunk[:, :, group].int()]
        factors |= (scales[:, :, group].int() + (_DECODED + 127 - _BIAS)) << 8 * group
    return words, factors


def of_blocks(blocks: torch.Tensor, exponents: torch.Tensor, has_gates: bool) -> Mxfp4Weight:
    """The weight of blocks and exponents that have a first dimension more than those of `packed`. `has_gates`: the
    first half of the rows are gates, the other half ups."""
    each = [packed(*own) for own in zip(blocks, exponents, strict=True)]
    words, scales = torch.stack([own for own, _ in each]), torch.stack([own for _, own in each])
    if has_gates:
        rows = blocks.shape[1]
        order = row_of_turns(torch.arange(rows, device=blocks.device), rows // 2).argsort()
        words, scales = words[:, :, order], scales[:, :, order]
    return Mxfp4Weight(words.contiguous(), scales.contiguous())


@cache
def _tables(device: torch.device) -> list[torch.Tensor]:
    """For each group, what a byte of two numbers is in a word: int32 `[256]`."""
    byte = torch.arange(256, device=device)
    tables = []
    for sign, others in zip(_SIGNS, _OTHERS, strict=True):
        first, second = (((code >> 3) << sign) | ((code & 7) << others) for code in (byte & 15, byte >> 4))
        whole = first | second << 16
        tables.append(torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int())
    return tables


def row_of_turns(row: torch.Tensor, size: int) -> torch.Tensor:
    """Where the rows of gates and ups are that are in turns. row: int64, with the `size` gates before the ups."""
    place = row % size
    return place // TURN * 2 * TURN + place % TURN + row // size * TURN


def multiplied_out(weight: Mxfp4Weight, columns: int, has_gates: bool) -> torch.Tensor:
    """The numbers of a weight of `columns` columns, float32 `[experts, rows, columns]`, gates before ups."""
    numbers = torch.tensor((*E2M1, *(-number for number in E2M1)), device=weight.words.device)
    parts = []
    for group, (sign, others) in enumerate(zip(_SIGNS, _OTHERS, strict=True)):
        halves = torch.stack((weight.words, weight.words >> 16), -1)
        codes = (((halves >> sign) & 1) << 3) | ((halves >> others) & 7)
        exponents = ((weight.scales >> 8 * group) & 255) - _DECODED - 127
        parts.append(torch.ldexp(numbers[codes], exponents[..., None, None]).flatten(3))
    whole = torch.stack(parts, 3).flatten(3).transpose(1, 2).flatten(2)[..., :columns]
    if not has_gates:
        return whole
    rows = whole.shape[1]
    return whole[:, row_of_turns(torch.arange(rows, device=whole.device), rows // 2)]
