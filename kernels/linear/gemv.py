"""Matrix-vector products as Triton kernels, for decoding one sequence on a GPU: bound by reading weights from memory.

On an H200 Llama-3.1-8B decodes one sequence at 233 tokens/s in bfloat16 and at 359 in fp8 (`bench/RESULTS.md`).

- Norm, bias, residual and activation are fused with the product. For one row, starting a kernel for any of them would
  take longer than its work.
- Weights are read ahead: the first part before the kernel waits for the kernel before it, each further part before the
  last one is multiplied. Rows of a few parts are read whole before it waits.
- 4 columns of an 8-bit weight are read as one number and unpacked here. Triton gives each byte a register, and moving
  those takes longer than reading the weights: without the unpacking here fp8 gave 201 tokens/s.

Imported only where there is a GPU (or Triton's interpreter). Arithmetic is in float32 whatever the tensors' dtypes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.linear.fp8_format import GROUP
from kernels.ops.fused import activated
from kernels.pdl import launch_dependents, wait_for_previous

_PACKED = 4  # columns of an 8-bit weight that are read as one number
_WHOLE = 8192  # numbers of a program's rows, up to which it reads all of them before it waits
_OF_ROWS, _OF_GROUPS = tl.constexpr(1), tl.constexpr(2)  # kinds of scales
_GROUP = tl.constexpr(GROUP)
_HALVED = tl.constexpr(256.0)  # factor by which `_add_product` makes sums of 8-bit weights too small


class _Tile(NamedTuple):
    """The tile of the weight that one program reads at a time: `rows` rows of `numbers` numbers. `warps` read it."""

    rows: int
    numbers: int
    warps: int


def _tile(rows: int, numbers: int, is_packed: bool) -> _Tile:
    """The fastest tiles on an H200 for the shapes of Llama-3.1-8B and Qwen3-0.6B. They give each multiprocessor a few
    programs, and each thread several independent loads of 16 bytes."""
    if is_packed:
        height, width, warps = (16, 128, 4) if rows >= 16384 else (16, 256, 8) if rows >= 4096 else (8, 256, 4)
        return _Tile(height, min(triton.next_power_of_2(numbers), width), warps)
    height = 4 if rows >= 4096 else 2
    width = 512 if rows == 4096 else 1024
    return _Tile(height, min(triton.next_power_of_2(numbers), width), 4)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns `x @ weight.T + bias + residual`, `[1, out]`, for x `[1, in]` and a contiguous weight `[out, in]`.

    With `norm` (`[in]`), x is first normalised by its root mean square and multiplied by `norm`. The result is in
    `out`, of any float dtype, or in a new tensor of x's dtype. A float8_e4m3fn weight has `scales`, float32 `[out, 1]`,
    or `[out, groups]` in memory by group. Raises ValueError if such a weight's columns are no multiple of 4.
    """
    rows, columns = weight.shape
    if out is None:
        out = x.new_empty(1, rows)
    numbers, tile = _read(weight, rows)
    _gemv[(triton.cdiv(rows, tile.rows),)](
        x,
        numbers,
        x if bias is None else bias,
        x if scales is None else scales,
        x if norm is None else norm,
        x if residual is None else residual,
        out,
        rows,
        columns,
        eps,
        norm is not None,
        bias is not None,
        _kind(scales),
        residual is not None,
        columns // numbers.shape[1],
        triton.cdiv(columns, tile.numbers) if columns == numbers.shape[1] and tile.rows * columns <= _WHOLE else 0,
        tile.rows,
        tile.numbers,
        num_warps=tile.warps,
        **pdl.OPTIONS,
    )
    return out


def gated_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gelu: bool = False,
) -> torch.Tensor:
    """Returns the gated activation, `[1, out]`, of `gemv` with a weight `[2 * out, in]`, gates first and then ups."""
    rows, columns = weight.shape[0] // 2, weight.shape[1]
    out = x.new_empty(1, rows)
    numbers, tile = _read(weight, 2 * rows)
    height = max(1, tile.rows // 2)
    _gated_gemv[(triton.cdiv(rows, height),)](
        x,
        numbers,
        x if bias is None else bias,
        x if scales is None else scales,
        x if norm is None else norm,
        out,
        rows,
        columns,
        eps,
        gelu,
        norm is not None,
        bias is not None,
        _kind(scales),
        columns // numbers.shape[1],
        height,
        tile.numbers,
        num_warps=tile.warps,
        **pdl.OPTIONS,
    )
    return out


def _kind(scales: torch.Tensor | None) -> int:
    """Whether a weight has no scales, those of rows, or those of groups: what `SCALES` is in the kernels."""
    return 0 if scales is None else 1 if scales.shape[1] == 1 else 2


def _read(weight: torch.Tensor, rows: int) -> tuple[torch.Tensor, _Tile]:
    """The weight as programs read it, and the tile of a program. Raises ValueError for an 8-bit weight whose columns
    are no multiple of `_PACKED`."""
    is_packed = weight.itemsize == 1
    if is_packed and weight.shape[1] % _PACKED:
        raise ValueError(f"a weight in 8 bits has a multiple of {_PACKED} columns, not {weight.shape[1]}")
    numbers = weight.view(torch.int32) if is_packed else weight
    return numbers, _tile(rows, numbers.shape[1], is_packed)


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    scales,
    norm,
    residual,
    out,
    rows,
    columns,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    numbers = columns // PACKED
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lines = weight + row.to(tl.int64)[:, None] * numbers
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_ROWS, BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    if PARTS > 0:
        parts = ()
        for i in tl.static_range(PARTS):
            parts += (_read_part(lines, row, rows, i * BLOCK + at, numbers),)  # type: ignore[assignment]
        wait_for_previous()
        for i in tl.static_range(PARTS):
            total, squares = _add_part(
                total, squares, parts[i], x, norm, scales, row, rows, i * BLOCK + at, numbers, NORM, SCALES, PACKED
            )
    else:
        part = _read_part(lines, row, rows, at, numbers)
        wait_for_previous()
        for _ in range(0, numbers, BLOCK):
            ahead = at + BLOCK
            next_part = _read_part(lines, row, rows, ahead, numbers)
            total, squares = _add_part(
                total, squares, part, x, norm, scales, row, rows, at, numbers, NORM, SCALES, PACKED
            )
            at, part = ahead, next_part
    result = tl.sum(total, 1)
    if SCALES == _OF_ROWS:
        result *= tl.load(scales + row, mask=row < rows, other=0.0) * _HALVED
    if NORM:
        result *= tl.math.rsqrt(tl.sum(squares) / columns + eps)
    if BIAS:
        result += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    if RESIDUAL:
        result += tl.load(residual + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _read_part(lines, row, rows, at, numbers):
    """The numbers `at` of some of `rows` rows, `[rows, n]`."""
    mask = (row < rows)[:, None] & (at < numbers)[None, :]
    return tl.load(lines + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _add_part(
    total,
    squares,
    part,
    x,
    norm,
    scales,
    row,
    rows,
    at,
    numbers,
    NORM: tl.constexpr,
    SCALES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """`total` and `squares` with the products and squares of `part`, the numbers `at` of some rows."""
    a, b, c, d, square = _values(x, norm, at, numbers, NORM, PACKED)
    if SCALES == _OF_GROUPS:
        own = _group_scales(scales, row, rows, at, numbers, PACKED)
        total += own * _add_product(tl.zeros_like(total), part, a, b, c, d, PACKED)
    else:
        total = _add_product(total, part, a, b, c, d, PACKED)
    return total, squares + square


@triton.jit
def _gated_gemv(
    x,
    weight,
    bias,
    scales,
    norm,
    out,
    rows,
    columns,
    eps,
    GELU: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    numbers = columns // PACKED
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    gates = weight + row.to(tl.int64)[:, None] * numbers
    ups = gates + rows.to(tl.int64) * numbers
    at = tl.arange(0, BLOCK)
    gate = tl.zeros([BLOCK_ROWS, BLOCK], dtype=tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    mask = (row < rows)[:, None] & (at < numbers)[None, :]
    gate_part = tl.load(gates + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    up_part = tl.load(ups + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous()
    for _ in range(0, numbers, BLOCK):
        ahead = at + BLOCK
        mask = (row < rows)[:, None] & (ahead < numbers)[None, :]
        next_gate = tl.load(gates + ahead[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        next_up = tl.load(ups + ahead[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        a, b, c, d, square = _values(x, norm, at, numbers, NORM, PACKED)
        squares += square
        if SCALES == _OF_GROUPS:
            own = _group_scales(scales, row, 2 * rows, at, numbers, PACKED)
            gate += own * _add_product(tl.zeros_like(gate), gate_part, a, b, c, d, PACKED)
            own = _group_scales(scales, rows + row, 2 * rows, at, numbers, PACKED)
            up += own * _add_product(tl.zeros_like(up), up_part, a, b, c, d, PACKED)
        else:
            gate = _add_product(gate, gate_part, a, b, c, d, PACKED)
            up = _add_product(up, up_part, a, b, c, d, PACKED)
        at, gate_part, up_part = ahead, next_gate, next_up
    opened, lifted = tl.sum(gate, 1), tl.sum(up, 1)
    if SCALES == _OF_ROWS:
        opened *= tl.load(scales + row, mask=row < rows, other=0.0) * _HALVED
        lifted *= tl.load(scales + rows + row, mask=row < rows, other=0.0) * _HALVED
    if NORM:
        scale = tl.math.rsqrt(tl.sum(squares) / columns + eps)
        opened *= scale
        lifted *= scale
    if BIAS:
        opened += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
        lifted += tl.load(bias + rows + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out + row, (activated(opened, GELU) * lifted).to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _values(x, norm, at, numbers, NORM: tl.constexpr, PACKED: tl.constexpr):
    """The factors for the columns of each number `at`, as 4 vectors, and the sum of the squares of x there, without the
    norm's weight. Only the first vector counts if a number is one column."""
    inside = at < numbers
    a, b, c, d = _columns(x, at, inside, PACKED)
    square = a * a
    if PACKED > 1:
        square += b * b + c * c + d * d
    if NORM:
        e, f, g, h = _columns(norm, at, inside, PACKED)
        a, b, c, d = a * e, b * f, c * g, d * h
    return a, b, c, d, square


@triton.jit
def _columns(source, at, inside, PACKED: tl.constexpr):
    """The values of `source` for the columns of each number, as 4 vectors. 4 values of 16 bits are read at once:
    reading them one at a time takes longer than reading the weights."""
    if PACKED == 1:
        a = tl.load(source + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        b, c, d = a, a, a
    elif source.dtype.element_ty.primitive_bitwidth == 16:
        words = source.to(tl.pointer_type(tl.int64), bitcast=True)
        four = tl.load(words + at, mask=inside, other=0, eviction_policy="evict_last")
        a, b = _lower(four, source.dtype.element_ty), _lower(four >> 16, source.dtype.element_ty)
        c, d = _lower(four >> 32, source.dtype.element_ty), _lower(four >> 48, source.dtype.element_ty)
    else:
        first = source + at * PACKED
        a = tl.load(first, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        b = tl.load(first + 1, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        c = tl.load(first + 2, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        d = tl.load(first + 3, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return a, b, c, d


@triton.jit
def _add_product(total, part, a, b, c, d, PACKED: tl.constexpr):
    """Adds `part`, numbers of the weight, times the vectors of `_values` to `total` `[rows, n]`. For an 8-bit weight
    the products are too small by the factor `_HALVED`."""
    if PACKED > 1:
        # An e4m3 value in the upper byte of 16 bits becomes a float16 if all bits after the sign move down by one. The
        # exponents come out 8 too small, since the two formats have different biases: hence `_HALVED`, 2 ** 8.
        low = part << 8
        low = (low & -0x7FFF8000) | ((low & 0x7F007F00) >> 1)
        high = (part & -0x7FFF8000) | ((part & 0x7F007F00) >> 1)
        total += _lower(low, tl.float16) * a[None, :]
        total += _lower(high, tl.float16) * b[None, :]
        total += _lower(low >> 16, tl.float16) * c[None, :]
        total += _lower(high >> 16, tl.float16) * d[None, :]
    else:
        total += part.to(tl.float32) * a[None, :]
    return total


@triton.jit
def _group_scales(scales, row, rows, at, numbers, PACKED: tl.constexpr):
    """The scales of the numbers `at` of some of `rows` rows, `[rows, n]`."""
    group = (at // (_GROUP // PACKED)).to(tl.int64)
    mask = (row < rows)[:, None] & (at < numbers)[None, :]
    return tl.load(scales + group[None, :] * rows + row[:, None], mask=mask, other=0.0) * _HALVED


@triton.jit
def _lower(bits, kind: tl.constexpr):
    """The lower 16 bits of `bits`, a number of type `kind`, as float32."""
    return bits.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
