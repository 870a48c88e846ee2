"""Products with block-quantized weights on CPUs, compiled by numba. A row of the result does not depend on the other
rows of x.

| kernel | how | for |
| --- | --- | --- |
| `digits` | an x becomes three digits of 7 bits, with a factor for each group | CPUs that have dots of bytes (VNNI) |
| `floats` | weights become floats in registers | others |
| `weights` | writes the weights, for a product with BLAS | others, for many rows |

Sums of digits over a group are exact integers. A factor is the largest x of a group, divided by 127 * 2**14: an x is
rounded by at most 2**-21 of the largest x in its group. The error of a product, measured on random numbers, is 3.5e-7
of its size; BLAS's in float32 is 1.2e-7 to 2.9e-7.
"""

from functools import cache
from typing import Literal

import numpy as np
from numba import carray, cfunc, njit, types
from numba.core.ccallback import CFunc

from kernels.intrinsics import claim, float32_at, float_of_bits, int8_at, uint8_at, uint16_at
from kernels.linear.block_instructions import DIGITS, LANES, digit_product, float_product, group_weights

ROWS = 4  # of x, for which a tile is read once
_CHUNK = 64  # rows of x whose digits are kept at a time

# Index of each argument in the int64 array that a kernel gets.
#
# | argument | number |
# | --- | --- |
# | NEXT | the next item to be claimed, 0 at first: a tile, and a chunk of rows |
# | FIRST, TILES | the first tile, and their number |
# | GROUPS | groups of columns of a tile |
# | SHARE | groups that have an element of SCALES and LEAST in common |
# | ZERO | the integer that stands for 0 |
# | HALF | whether SCALES and LEAST are float16, else float32 |
# | N, X_ROW, OUT_ROW, OUTS | rows of x; elements from one to the next; the same for OUT; columns of OUT |
#
# The others are addresses of arrays, 0 for none:
#
# | argument | array |
# | --- | --- |
# | QUANTS | the integers |
# | SCALES, LEAST | [tiles, GROUPS / SHARE, LANES] |
# | SUB_SCALES, SUB_LEAST | int8 and uint8 [tiles, GROUPS, LANES]: factors of SCALES and LEAST |
# | X | float32 [N, columns] |
# | OUT | float32 [N, OUTS]; for weights [columns, TILES, LANES] |
NEXT, FIRST, TILES, GROUPS, SHARE, ZERO, HALF, N, X_ROW, OUT_ROW, OUTS = range(11)
QUANTS, SCALES, LEAST, SUB_SCALES, SUB_LEAST, X, OUT = range(11, 18)
NUM_ARGUMENTS = 18

_FLOAT32_BYTES = 4
_KIND = types.void(types.CPointer(types.int64))


@njit
def _expand(address, is_half, first, count, share, out):  # type: ignore[no-untyped-def]
    """out[g] = the numbers of group g // share, of `count` groups, in a tile whose numbers begin at element `first`."""
    if is_half:
        halves = carray(uint16_at(address + 2 * first), (count * LANES,))
        for group in range(count):
            begin = group // share * LANES
            for lane in range(LANES):
                bits = np.int32(halves[begin + lane])
                # The exponent is larger by 112 in float32.
                size = float_of_bits((bits & np.int32(0x7FFF)) << np.int32(13)) * np.float32(2.0**112)
                out[group, lane] = -size if bits & np.int32(0x8000) else size
    else:
        floats = carray(float32_at(address + 4 * first), (count * LANES,))
        for group in range(count):
            begin = group // share * LANES
            for lane in range(LANES):
                out[group, lane] = floats[begin + lane]


@njit
def _expand_tile(a, tile, scales, least):  # type: ignore[no-untyped-def]
    """Writes the scale and the least weight of each group of a tile, float32 [groups, LANES] both."""
    groups, share, is_half = a[GROUPS], a[SHARE], a[HALF] != 0
    first, all_first = tile * (groups // share) * LANES, tile * groups * LANES
    _expand(a[SCALES], is_half, first, groups, share, scales)
    if a[SUB_SCALES] != 0:
        factors = carray(int8_at(a[SUB_SCALES] + all_first), (groups, LANES))
        for group in range(groups):
            for lane in range(LANES):
                scales[group, lane] *= np.float32(factors[group, lane])
    if a[LEAST] == 0:
        least[:] = np.float32(0)
        return
    _expand(a[LEAST], is_half, first, groups, share, least)
    if a[SUB_LEAST] != 0:
        portions = carray(uint8_at(a[SUB_LEAST] + all_first), (groups, LANES))
        for group in range(groups):
            for lane in range(LANES):
                least[group, lane] *= np.float32(portions[group, lane])


@njit
def _store(a, tile, row, count, totals):  # type: ignore[no-untyped-def]
    """Copies the totals of a tile to OUT, for `count` rows of x from `row` on."""
    outs = min(LANES, a[OUTS] - tile * LANES)
    for i in range(count):
        place = ((row + i) * a[OUT_ROW] + tile * LANES) * _FLOAT32_BYTES
        out = carray(float32_at(a[OUT] + place), (outs,))
        for lane in range(outs):
            out[lane] = totals[i, lane]


@njit(fastmath={"contract", "reassoc", "nsz"})
def _sum_groups(a, columns, sums):  # type: ignore[no-untyped-def]
    """sums[i, g] = the sum of row i of x over group g, of `columns` columns."""
    for row in range(a[N]):
        x = carray(float32_at(a[X] + row * a[X_ROW] * _FLOAT32_BYTES), (a[GROUPS], columns))
        for group in range(a[GROUPS]):
            total = np.float32(0)
            for column in range(columns):
                total += x[group, column]
            sums[row, group] = total


@njit
def _take_digits(x, zero, digits, corrections, factors):  # type: ignore[no-untyped-def]
    """Writes a row of x, float32 [groups, columns], as `digit_product` takes it."""
    for group in range(x.shape[0]):
        most = np.float32(0)
        for column in range(x.shape[1]):
            most = max(most, abs(x[group, column]))
        # The first digit is at most 127. NaN and infinity become NaN in the factor, and so in the result.
        factor = most / np.float32(127 * 2**14)
        inverse = np.float32(127 * 2**14) / most if most > 0 else np.float32(0)
        s0 = s1 = s2 = np.int32(0)
        for column in range(x.shape[1]):
            whole = np.int32(np.rint(x[group, column] * inverse))
            first = (whole + np.int32(1 << 13)) >> np.int32(14)
            rest = whole - (first << np.int32(14))
            second = (rest + np.int32(64)) >> np.int32(7)
            third = rest - (second << np.int32(7))
            digits[0, group, column], digits[1, group, column] = first, second
            digits[2, group, column] = third
            s0 += first
            s1 += second
            s2 += third
        corrections[group, 0], corrections[group, 1], corrections[group, 2] = zero * s0, zero * s1, zero * s2
        factors[group, 0] = factor
        whole_sum = (np.float32(s0) * np.float32(128) + np.float32(s1)) * np.float32(128) + np.float32(s2)
        factors[group, 1] = factor * whole_sum


def _digits(bits: int, columns: int):  # type: ignore[no-untyped-def]
    one, several = digit_product(bits, columns, 1), digit_product(bits, columns, ROWS)
    tile_bytes = LANES * columns * bits // 8

    @cfunc(_KIND)
    def digits_kernel(arguments):  # type: ignore[no-untyped-def]
        a = carray(arguments, (NUM_ARGUMENTS,))
        groups, n, tiles = a[GROUPS], a[N], a[TILES]
        scales, least = np.empty((groups, LANES), np.float32), np.empty((groups, LANES), np.float32)
        totals = np.empty((ROWS, LANES), np.float32)
        most = min(n, _CHUNK)
        digits = np.empty((most, DIGITS, groups, columns), np.int8)
        corrections = np.empty((most, groups, DIGITS), np.int32)
        factors = np.empty((most, groups, 2), np.float32)
        items, held = (n + _CHUNK - 1) // _CHUNK * tiles, -1
        while True:
            item = claim(arguments)
            if item >= items:
                return
            chunk, tile = item // tiles, a[FIRST] + item % tiles
            begin = chunk * _CHUNK
            count = min(n - begin, _CHUNK)
            if chunk != held:
                held = chunk
                for row in range(count):
                    x = carray(float32_at(a[X] + (begin + row) * a[X_ROW] * _FLOAT32_BYTES), (groups, columns))
                    _take_digits(x, np.int32(a[ZERO]), digits[row], corrections[row], factors[row])
            _expand_tile(a, tile, scales, least)
            quants = a[QUANTS] + tile * groups * tile_bytes
            row = 0
            while row < count:
                d, c, f = digits[row].ctypes.data, corrections[row].ctypes.data, factors[row].ctypes.data
                t, s, m = totals.ctypes.data, scales.ctypes.data, least.ctypes.data
                of = ROWS if row + ROWS <= count else 1
                if of == ROWS:
                    several(t, quants, s, m, groups, d, c, f)
                else:
                    one(t, quants, s, m, groups, d, c, f)
                _store(a, tile, begin + row, of, totals)
                row += of

    return digits_kernel


def _floats(bits: int, columns: int):  # type: ignore[no-untyped-def]
    one, several = float_product(bits, columns, 1), float_product(bits, columns, ROWS)
    tile_bytes = LANES * columns * bits // 8

    @cfunc(_KIND)
    def floats_kernel(arguments):  # type: ignore[no-untyped-def]
        a = carray(arguments, (NUM_ARGUMENTS,))
        groups, n, zero = a[GROUPS], a[N], a[ZERO]
        scales, least = np.empty((groups, LANES), np.float32), np.empty((groups, LANES), np.float32)
        sums, totals = np.empty((n, groups), np.float32), np.empty((ROWS, LANES), np.float32)
        _sum_groups(a, columns, sums)
        x_bytes = a[X_ROW] * _FLOAT32_BYTES
        while True:
            item = claim(arguments)
            if item >= a[TILES]:
                return
            tile = a[FIRST] + item
            _expand_tile(a, tile, scales, least)
            quants = a[QUANTS] + tile * groups * tile_bytes
            row = 0
            while row < n:
                x, own = a[X] + row * x_bytes, sums[row].ctypes.data
                t, s, m = totals.ctypes.data, scales.ctypes.data, least.ctypes.data
                of = ROWS if row + ROWS <= n else 1
                if of == ROWS:
                    several(t, quants, zero, s, m, groups, x, x_bytes, own)
                else:
                    one(t, quants, zero, s, m, groups, x, x_bytes, own)
                _store(a, tile, row, of, totals)
                row += of

    return floats_kernel


def _weights(bits: int, columns: int):  # type: ignore[no-untyped-def]
    write = group_weights(bits, columns)
    group_bytes = LANES * columns * bits // 8

    @cfunc(_KIND)
    def weights_kernel(arguments):  # type: ignore[no-untyped-def]
        a = carray(arguments, (NUM_ARGUMENTS,))
        groups, column_bytes = a[GROUPS], a[TILES] * LANES * _FLOAT32_BYTES
        scales, least = np.empty((groups, LANES), np.float32), np.empty((groups, LANES), np.float32)
        while True:
            item = claim(arguments)
            if item >= a[TILES]:
                return
            tile = a[FIRST] + item
            _expand_tile(a, tile, scales, least)
            for group in range(groups):
                quants = a[QUANTS] + (tile * groups + group) * group_bytes
                out = a[OUT] + item * LANES * _FLOAT32_BYTES + group * columns * column_bytes
                write(quants, a[ZERO], scales[group].ctypes.data, least[group].ctypes.data, out, column_bytes)

    return weights_kernel


@cache
def kernel(name: Literal["digits", "floats", "weights"], bits: int, columns: int) -> CFunc:
    """The kernel of a name for integers of `bits` bits and groups of `columns` columns. Compiled at its first use in a
    process, which takes 1 to 2 s: numba cannot keep functions on disk that are made of such parts."""
    made: CFunc = {"digits": _digits, "floats": _floats, "weights": _weights}[name](bits, columns)
    return made
