"""Machine instructions that numba has no names for, for use in functions that numba compiles."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _pointer_at(item: types.Type) -> Any:
    @intrinsic
    def at(typing_context: Any, address: types.Integer) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(item)))

        return types.CPointer(item)(types.int64), generate

    return at


# Address (int64) to pointer, for `carray`.
float32_at = _pointer_at(types.float32)
uint16_at = _pointer_at(types.uint16)
int32_at = _pointer_at(types.int32)
int8_at = _pointer_at(types.int8)
uint8_at = _pointer_at(types.uint8)


@intrinsic
def claim(typing_context: Any, counter: types.CPointer) -> Any:
    """Take the next number from a shared int64 counter. No two callers, in any threads, get the same number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: types.Integer) -> Any:
    """The float32 with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def widened(typing_context: Any, value: types.Number) -> Any:
    """The value as float32. A bfloat16 is given as uint16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[0] == types.float32:
            return arguments[0]
        bits = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(value), generate


@intrinsic
def prefetch(typing_context: Any, pointer: types.CPointer, index: types.Integer) -> Any:
    """Begin to load the cache line of `pointer[index]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = builder.module.globals.get("llvm.prefetch.p0")
        if function is None:
            function = ir.Function(builder.module, function_type, "llvm.prefetch.p0")
        place = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        # 0: for reading; 3: to be kept in the cache; 1: data, not instructions.
        builder.call(function, [place, ir.Constant(flag, 0), ir.Constant(flag, 3), ir.Constant(flag, 1)])
        return context.get_dummy_value()

    return types.void(pointer, types.int64), generate
