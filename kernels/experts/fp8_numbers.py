"""Reading of experts' weights that are in 8 bits (e4m3), in Triton. Activations stay in 16 bits: reading the weights of
the chosen experts is what takes time at few tokens, and any GPU multiplies so.

Imported only where there is a GPU (or Triton's interpreter).
"""

import triton
import triton.language as tl

from kernels.experts.weights import ExpertScales


def arguments(scales: ExpertScales | None, absent: object) -> tuple[object, int]:
    """A kernel's pointer to scales and its SCALES, the columns of a group: 0 for none, with `absent` in their place."""
    return (absent, 0) if scales is None else (scales.factors, scales.columns)


@triton.jit
def numbers(part, kind: tl.constexpr, SCALES: tl.constexpr):
    """A part of a weight in type `kind`: a 256th of the numbers where it has scales, which have the factor."""
    if SCALES > 0:
        # The bits after the sign move down by one in a float16 whose upper byte they are. The exponents come out 8 too
        # small, since the two formats have different biases.
        bits = part.to(tl.int16)
        part = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return part.to(kind)


@triton.jit
def scales_of(scales, expert, column, row, columns, rows, mask, SCALES: tl.constexpr):
    """The scales of some rows of an expert's weight, `[rows, columns]`, at `column`, in the shapes that `row` and
    `column` make together."""
    groups = tl.cdiv(columns, SCALES)
    return tl.load(scales + (expert * groups + column // SCALES) * rows + row, mask=mask, other=0.0)
