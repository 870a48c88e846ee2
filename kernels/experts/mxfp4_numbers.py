"""Reading of experts' weights that are in MXFP4 (`kernels.experts.mxfp4_weight` has the order of the bits), in Triton.

The three bits of e2m1 after the sign become the lowest two of bfloat16's exponent and the highest of its mantissa. That
is 2 ** -126 of the number, also where it is 0 or 0.5, whose exponent is zero in both formats. The multiplication with
the group's scale, which has that factor, makes it whole, and rounds nothing.

Imported only where there is a GPU (or Triton's interpreter).
"""

import torch
import triton
import triton.language as tl

# Two numbers at once, which Triton does not do by itself. Without, products have a fifth more instructions.
_IN_PAIRS = tl.constexpr(torch.cuda.is_available())


@triton.jit
def bits_of_group(words, GROUP: tl.constexpr):
    """The pairs of bfloat16 that `words` have of a group: two in each, of 2 ** -126 of the numbers."""
    if GROUP == 0:
        bits = words & -0x7E3F7E40
    elif GROUP == 1:
        bits = (words << 3) & -0x7E3F7E40
    elif GROUP == 2:
        bits = ((words << 6) & 0x01C001C0) | ((words << 2) & -0x7FFF8000)
    else:
        bits = ((words >> 3) & 0x01C001C0) | ((words << 1) & -0x7FFF8000)
    return bits


@triton.jit
def scale_of_group(scales, GROUP: tl.constexpr):
    """A group's scales, int32 with the bits of bfloat16 in the lower half."""
    return (scales << 7 if GROUP == 0 else scales >> (8 * GROUP - 7)) & 0x7F80


@triton.jit
def numbers_of_group(words, scales, GROUP: tl.constexpr):
    """The numbers of a group, bfloat16 `[..., rows, WORDS, 2]`, of words `[..., rows, WORDS]` and scales `[..., rows,
    1]`."""
    bits = bits_of_group(words, GROUP)
    scale = scale_of_group(scales, GROUP)
    if _IN_PAIRS:
        both = tl.broadcast_to(scale | (scale << 16), words.shape)
        # Minus zero is added, which changes no number: GPUs before Hopper have no plain product of pairs.
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [bits, both],
            tl.int32,
            True,
            1,
        )
        numbers = tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:
        factor = (scale << 16).to(tl.float32, bitcast=True)
        first = (bits << 16).to(tl.float32, bitcast=True) * factor
        second = (bits & -0x10000).to(tl.float32, bitcast=True) * factor
        numbers = tl.join(first, second).to(tl.bfloat16)
    return numbers


@triton.jit
def numbers_of_chunk(words, scales):
    """The numbers of a chunk, bfloat16 `[rows, CHUNK]`, of words `[rows, WORDS]` and scales `[rows, 1]`."""
    first = tl.join(numbers_of_group(words, scales, 0), numbers_of_group(words, scales, 1))
    last = tl.join(numbers_of_group(words, scales, 2), numbers_of_group(words, scales, 3))
    # [rows, WORDS, 2 of a word, groups 0 and 1 or 2 and 3, which two]
    return tl.join(first, last).permute(0, 4, 3, 1, 2).reshape(words.shape[0], 8 * words.shape[1])
