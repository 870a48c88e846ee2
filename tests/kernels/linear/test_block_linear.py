"""Weights in blocks: exactly those of the formats, and their products."""

import gguf
import numpy as np
import pytest
import torch

from kernels.linear.block_instructions import has_byte_dots
from kernels.linear.block_linear import FEW_ROWS, BlockLinear, BlockProduct
from kernels.linear.block_weight import BlockMatrix, BlockWeight
from kernels.linear.ggml_blocks import FORMATS, read_blocks

ROWS, COLUMNS = 50, 512  # the last tile has 2 rows
# Bytes where a block has the low byte of a float16; all others may be anything.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
HALVES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
DOTS = [False, pytest.param(True, marks=pytest.mark.skipif(not has_byte_dots(), reason="needs VNNI"))]


def random_rows(kind: str, rows: int = ROWS) -> np.ndarray:
    rng = np.random.default_rng(len(kind) + rows)
    own = FORMATS[kind]
    blocks = rng.integers(0, 256, (rows, COLUMNS // own.columns, own.bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.normal(0, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
        halves[0, 0] = 3e-7  # a subnormal number
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def exact(kind: str, raw: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_those_of_the_format(kind: str) -> None:
    raw = random_rows(kind)
    blocks = read_blocks(kind, torch.from_numpy(raw))
    weight, wanted = BlockWeight.of(blocks), exact(kind, raw)
    assert torch.equal(BlockProduct(weight).dense(), wanted)
    ids = torch.tensor([0, 49, 3, 3, 17])
    assert torch.equal(weight.gather(ids), wanted[ids])
    assert weight.nbytes < (0.7 if weight.bits == 4 else 1.4) * 64 * COLUMNS


@pytest.mark.parametrize("dots", DOTS)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_products(kind: str, dots: bool) -> None:
    raw = random_rows(kind)
    product = BlockProduct(BlockWeight.of(read_blocks(kind, torch.from_numpy(raw))), dots)
    x = torch.randn(70, COLUMNS, generator=torch.Generator().manual_seed(1))
    x[3] = 0
    x[5] *= 1e6
    x[7, 9] = 300
    wanted = x.double() @ exact(kind, raw).double().t()
    every = torch.full((70, ROWS), torch.nan)
    product.into(x, every)
    for row in range(70):
        assert torch.equal(every[row], wanted[row].float()) if row == 3 else error(every[row], wanted[row]) < 2e-6
    for n in (1, 6):  # one row by itself, and some at once
        some = torch.empty(n, ROWS)
        product.into(x[:n], some)
        assert dots is False or torch.equal(some, every[:n])
        assert error(some, wanted[:n]) < 2e-6
    assert n <= FEW_ROWS < len(x), "both ways without dots are tested"


def test_a_layer_of_several_formats_with_a_bias() -> None:
    kinds = ["Q4_1", "Q4_1", "Q8_0"]
    raw = [random_rows(kind, rows) for kind, rows in zip(kinds, (24, 8, 20), strict=True)]
    blocks = [read_blocks(kind, torch.from_numpy(one)) for kind, one in zip(kinds, raw, strict=True)]
    matrix = BlockMatrix.of(blocks)
    assert [part.rows for part in matrix.parts] == [32, 20]
    weight = torch.cat([exact(kind, one) for kind, one in zip(kinds, raw, strict=True)])
    ids = torch.tensor([51, 0, 31, 32])
    assert torch.equal(matrix.gather(ids), weight[ids])
    bias, x = torch.randn(52), torch.randn(3, COLUMNS)
    layer, wanted = BlockLinear(matrix, bias), x.double() @ weight.double().t() + bias
    out = torch.empty(3, 52)
    assert layer(x, out) is out and error(out, wanted) < 2e-6
    half = layer(x.bfloat16())
    assert half.dtype == torch.bfloat16 and error(half, wanted) < 0.01
    assert error(layer.in_float32(x), wanted - bias) < 2e-6


def test_what_is_added_is_zero() -> None:
    raw = random_rows("Q4_0", 20)
    larger = read_blocks("Q4_0", torch.from_numpy(raw)).padded(30, COLUMNS + 64)
    dense = BlockProduct(BlockWeight.of(larger)).dense()
    assert torch.equal(dense[:20, :COLUMNS], exact("Q4_0", raw))
    assert dense.shape == (30, COLUMNS + 64) and not dense[20:].any() and not dense[:, COLUMNS:].any()
