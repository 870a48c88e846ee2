"""The inner loops of products with block-quantized weights, as vector instructions.

numba would not keep 16 sums in a register, so the loops over a tile (`kernels.linear.block_weight`) are written in
LLVM's own language. LLVM cuts vectors of 16 into those that the CPU has.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16  # rows of a tile
DIGITS = 3  # of an activation, in `digit_product`
_CHAINS = 4  # sums of a row that do not wait for each other
_FLOAT, _INT32, _INT64, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
_FLOATS, _INTS, _EIGHT = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES), ir.VectorType(_INT32, LANES // 2)


def has_byte_dots() -> bool:
    """Whether this CPU sums products of bytes in one instruction (VNNI)."""
    return any(llvm.get_host_cpu_features().get(name, False) for name in ("avx512vnni", "avxvnni"))


class _VectorWriter:
    """Writes the instructions of one loop over the groups of a tile. Addresses are integers of 64 bits."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, kind: Any, arguments: list[Any]) -> Any:
        """Calls one of LLVM's intrinsics, whose arguments have the type of its result."""
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(kind, [kind] * len(arguments)), name)
        return self.builder.call(function, arguments)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c."""
        return self.call("llvm.fmuladd.v16f32", _FLOATS, [a, b, c])

    def dot(self, total: Any, weights: Any, digits: Any) -> Any:
        """Adds to each element of `total` the four products of the bytes of `weights`, without signs, and `digits`."""
        if llvm.get_host_cpu_features().get("avx512vnni", False):
            return self.call("llvm.x86.avx512.vpdpbusd.512", _INTS, [total, weights, digits])
        halves = []
        for first in (0, LANES // 2):
            places = ir.Constant(ir.VectorType(_INT32, LANES // 2), list(range(first, first + LANES // 2)))
            parts = [self.builder.shuffle_vector(each, each, places) for each in (total, weights, digits)]
            halves.append(self.call("llvm.x86.avx512.vpdpbusd.256", _EIGHT, parts))
        return self.builder.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES))))

    def splat(self, value: Any) -> Any:
        """A vector of equal numbers."""
        kind = ir.VectorType(value.type, LANES)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_INT32, 0))
        return self.builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * LANES))

    def ints(self, value: int) -> Any:
        return ir.Constant(_INTS, [value] * LANES)

    def at(self, base: Any, index: Any, size: int) -> Any:
        """Address of an element of `size` bytes."""
        return self.builder.add(base, self.builder.mul(index, ir.Constant(_INT64, size)))

    def load(self, kind: Any, address: Any, offset: int = 0) -> Any:
        """The value at an address, plus an offset in bytes."""
        place = self.builder.add(address, ir.Constant(_INT64, offset))
        loaded = self.builder.load(self.builder.inttoptr(place, kind.as_pointer()))
        loaded.align = 4
        return loaded

    def store(self, vector: Any, address: Any) -> None:
        stored = self.builder.store(vector, self.builder.inttoptr(address, vector.type.as_pointer()))
        stored.align = 4

    def fours(self, bits: int, columns: int, quants: Any) -> list[Any]:
        """The integers of a group, four columns in the bytes of each element."""
        words = [self.load(_INTS, quants, 4 * LANES * k) for k in range(columns * bits // 32)]
        if bits == 8:
            return words
        low = [self.builder.and_(word, self.ints(0x0F0F0F0F)) for word in words]
        high = [self.builder.lshr(word, self.ints(4)) for word in words]
        return low + [self.builder.and_(word, self.ints(0x0F0F0F0F)) for word in high]

    def values(self, bits: int, columns: int, quants: Any, zero: Any) -> list[Any]:
        """The integers of a group, less `zero`, as floats, by column."""
        values = []
        for four in self.fours(bits, columns, quants):
            for byte in range(4):
                one = four if byte == 0 else self.builder.lshr(four, self.ints(8 * byte))
                if byte < 3:
                    one = self.builder.and_(one, self.ints(255))
                values.append(self.builder.sitofp(self.builder.sub(one, zero), _FLOATS))
        return values

    def summed(self, groups: Any, rows: int, totals: Any, body: Any) -> None:
        """Writes the loop over groups, and stores the sums of each row to `totals`. `body(group, sums)` returns the
        sums with those of a group."""
        builder = self.builder
        before, loop = builder.block, builder.append_basic_block("group")
        after = builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        group = builder.phi(_INT64)
        group.add_incoming(ir.Constant(_INT64, 0), before)
        running = [builder.phi(_FLOATS) for _ in range(rows)]
        for each in running:
            each.add_incoming(ir.Constant(_FLOATS, [0.0] * LANES), before)
        news = body(group, running)
        for each, new in zip(running, news, strict=True):
            each.add_incoming(new, loop)
        following = builder.add(group, ir.Constant(_INT64, 1))
        group.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
        builder.position_at_end(after)
        for row, new in enumerate(news):
            self.store(new, builder.add(totals, ir.Constant(_INT64, 4 * LANES * row)))


def float_product(bits: int, columns: int, rows: int) -> Any:
    """Makes the function that multiplies `rows` rows of x with a tile, in float32.

    Its arguments are addresses and numbers, all int64:

    | argument | meaning |
    | --- | --- |
    | `totals` | float32 `[rows, LANES]`: the result |
    | `quants`, `zero` | the tile's integers, as `kernels.linear.block_weight` has them |
    | `scales`, `least` | float32 `[groups, LANES]` |
    | `groups` | groups of `columns` columns |
    | `x`, `x_bytes` | float32 rows of `groups * columns`, and bytes from one to the next |
    | `sums` | float32 `[rows, groups]`: the sum of x over each group |
    """

    @intrinsic
    def product(context: Any, totals, quants, zero, scales, least, groups, x, x_bytes, sums) -> Any:  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            totals, quants, zero, scales, least, groups, x, x_bytes, sums = arguments
            write = _VectorWriter(builder)
            zeros = write.splat(builder.trunc(zero, _INT32))

            def body(group: Any, running: list[Any]) -> list[Any]:
                own = write.at(quants, group, LANES * columns * bits // 8)
                values = write.values(bits, columns, own, zeros)
                scale, low = (write.load(_FLOATS, write.at(base, group, 4 * LANES)) for base in (scales, least))
                news = []
                for row, before in enumerate(running):
                    begin = write.at(builder.add(x, builder.mul(x_bytes, ir.Constant(_INT64, row))), group, 4 * columns)
                    parts = [ir.Constant(_FLOATS, [0.0] * LANES)] * _CHAINS
                    for k, value in enumerate(values):
                        one = write.splat(write.load(_FLOAT, begin, 4 * k))
                        parts[k % _CHAINS] = write.fma(one, value, parts[k % _CHAINS])
                    while len(parts) > 1:
                        parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
                    index = builder.add(group, builder.mul(groups, ir.Constant(_INT64, row)))
                    row_sum = write.splat(write.load(_FLOAT, write.at(sums, index, 4)))
                    news.append(write.fma(scale, parts[0], write.fma(low, row_sum, before)))
                return news

            write.summed(groups, rows, totals, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return product


def digit_product(bits: int, columns: int, rows: int) -> Any:
    """Makes the function that multiplies `rows` rows of x, given in digits, with a tile. Sums over a group are exact.

    An x is `factor * (d0 * 2**14 + d1 * 2**7 + d2)`. Arguments are those of `float_product`, but for these:

    | argument | meaning |
    | --- | --- |
    | `digits` | int8 `[rows, DIGITS, groups * columns]` |
    | `corrections` | int32 `[rows, groups, DIGITS]`: `zero` times the sum of each digit over each group |
    | `factors` | float32 `[rows, groups, 2]`: the factor, and the sum of x over the group |
    """

    @intrinsic
    def product(context: Any, totals, quants, scales, least, groups, digits, corrections, factors) -> Any:  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            totals, quants, scales, least, groups, digits, corrections, factors = arguments
            write = _VectorWriter(builder)
            plane = builder.mul(groups, ir.Constant(_INT64, columns))  # bytes of a digit of a row
            radix = ir.Constant(_FLOATS, [128.0] * LANES)

            def body(group: Any, running: list[Any]) -> list[Any]:
                fours = write.fours(bits, columns, write.at(quants, group, LANES * columns * bits // 8))
                scale, low = (write.load(_FLOATS, write.at(base, group, 4 * LANES)) for base in (scales, least))
                news = []
                for row, before in enumerate(running):
                    index = builder.add(group, builder.mul(groups, ir.Constant(_INT64, row)))
                    own = write.at(corrections, index, 4 * DIGITS)
                    parts = []
                    for digit in range(DIGITS):
                        shift = builder.mul(plane, ir.Constant(_INT64, DIGITS * row + digit))
                        begin = write.at(builder.add(digits, shift), group, columns)
                        total = write.ints(0)
                        for k, four in enumerate(fours):
                            total = write.dot(total, four, write.splat(write.load(_INT32, begin, 4 * k)))
                        total = builder.sub(total, write.splat(write.load(_INT32, own, 4 * digit)))
                        parts.append(builder.sitofp(total, _FLOATS))
                    product = write.fma(write.fma(parts[0], radix, parts[1]), radix, parts[2])
                    both = write.at(factors, index, 8)
                    product = builder.fmul(product, write.splat(write.load(_FLOAT, both)))
                    row_sum = write.splat(write.load(_FLOAT, both, 4))
                    news.append(write.fma(scale, product, write.fma(low, row_sum, before)))
                return news

            write.summed(groups, rows, totals, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return product


def group_weights(bits: int, columns: int) -> Any:
    """Makes the function that writes the weights of one group of a tile.

    Its arguments are addresses and numbers, all int64: `quants`, `zero`, `scales` and `least` of the group, `out`,
    float32, and `out_bytes` from one column there to the next. Each column has `LANES` weights.
    """

    @intrinsic
    def weights(context: Any, quants, zero, scales, least, out, out_bytes) -> Any:  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            quants, zero, scales, least, out, out_bytes = arguments
            write = _VectorWriter(builder)
            scale, low = write.load(_FLOATS, scales), write.load(_FLOATS, least)
            zeros = write.splat(builder.trunc(zero, _INT32))
            for k, value in enumerate(write.values(bits, columns, quants, zeros)):
                # Product and sum are rounded one by one, as in the formats' own definition.
                weight = builder.fadd(builder.fmul(scale, value), low)
                write.store(weight, write.at(out, out_bytes, k))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return weights
