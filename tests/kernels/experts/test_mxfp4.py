"""Experts with weights in MXFP4: the order of their bits, and both ways to compute the products, against the same
numbers in floating point."""

from typing import NamedTuple

import pytest
import torch

from kernels.experts import mxfp4_weight
from kernels.experts.choice import Routing, choose
from kernels.experts.experts import Experts
from kernels.experts.mxfp4_weight import GROUP, Mxfp4Weight, multiplied_out, of_blocks, packed
from kernels.experts.tiles import EACH_PAIR, ExpertTiles, ProductTile, default_tiles
from kernels.experts.weights import ExpertWeights
from kernels.ops.activation import ClampedSwiGLU
from kernels.ops.norm import rms_norm
from tests.kernels.device import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from kernels.experts import grouped, mxfp4_few_tokens

COUNT, HIDDEN, SIZE = 5, 160, 96  # two chunks of columns, the last of them not full, and one
GROUPED = ExpertTiles(16, ProductTile(32, 128, 4, 2), ProductTile(64, 128, 4, 2))
ALONE = ExpertTiles(EACH_PAIR, ProductTile(16, 128, 2, 2), ProductTile(16, 128, 2, 3))
CLAMPED = ClampedSwiGLU(1.0, 1.7)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def random_blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and exponents of a matrix, `[experts, rows, columns]`."""
    generator = torch.Generator().manual_seed(sum(shape))
    groups = (*shape[:2], shape[2] // GROUP)
    blocks = torch.randint(256, (*groups, GROUP // 2), dtype=torch.uint8, generator=generator)
    return blocks.to(DEVICE), torch.randint(119, 124, groups, dtype=torch.uint8, generator=generator).to(DEVICE)


class Both(NamedTuple):
    """Experts in MXFP4, and the same ones in float32 on a CPU."""

    own: ExpertWeights
    plain: Experts


@pytest.fixture(scope="module")
def both() -> Both:
    """Experts 1 to 5 of six."""
    gate_up = of_blocks(*random_blocks(COUNT, 2 * SIZE, HIDDEN), has_gates=True)
    down = of_blocks(*random_blocks(COUNT, HIDDEN, SIZE), has_gates=False)
    biases = random(COUNT, 2 * SIZE), random(COUNT, HIDDEN)
    numbers = multiplied_out(gate_up, HIDDEN, has_gates=True), multiplied_out(down, SIZE, has_gates=False)
    on_cpu = biases[0].cpu(), biases[1].cpu()
    plain = Experts(numbers[0].cpu(), numbers[1].cpu(), CLAMPED, 1, on_cpu)
    return Both(Experts(gate_up, down, CLAMPED, 1, biases).weights, plain)


def test_every_code() -> None:
    """In each place of a word, times powers of two."""
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(16)
    others = torch.arange(16, dtype=torch.uint8).repeat(16)
    blocks = (codes | others << 4).view(1, 16, 1, 16).expand(1, 16, 4, 16)
    exponents = torch.tensor([0, 127, 128, 100], dtype=torch.uint8).expand(1, 16, 4)
    numbers = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6))
    numbers = torch.cat((numbers, -numbers))
    pairs = torch.stack((numbers[codes.int()], numbers[others.int()]), 1).view(16, 1, 32)
    wanted = (pairs * torch.tensor([2.0**-127, 1.0, 2.0, 2.0**-27])[:, None]).flatten(1)
    assert torch.equal(multiplied_out(of_blocks(blocks, exponents, has_gates=False), 128, has_gates=False)[0], wanted)


def test_scales_that_products_lack() -> None:
    blocks, exponents = random_blocks(1, 8, 32)
    with pytest.raises(ValueError, match=r"scale above 2.*set dequantize"):
        packed(blocks[0], exponents[0] + 8)


def test_gates_and_ups_are_in_turns() -> None:
    blocks, exponents = random_blocks(2, 48, 32)
    kept = of_blocks(blocks, exponents, has_gates=True)
    own, plain = (multiplied_out(kept, 32, has_gates) for has_gates in (True, False))
    assert torch.equal(plain[:, 8:16], own[:, 24:32]) and torch.equal(plain[:, 16:24], own[:, 8:16])
    assert torch.equal(own, multiplied_out(of_blocks(blocks, exponents, has_gates=False), 32, has_gates=False))


@pytest.mark.interpreter
@pytest.mark.parametrize(("tokens", "tiles"), [(40, GROUPED), (2, ALONE)])
def test_products(tokens: int, tiles: ExpertTiles, both: Both) -> None:
    """Also of tokens some of whose experts are elsewhere."""
    x, (chosen, shares) = random(tokens, HIDDEN), choose(random(tokens, COUNT + 1), Routing(3))
    wanted = both.plain(x.cpu(), chosen.cpu(), shares.cpu())
    got = grouped.experts(both.own, x, chosen, shares, tiles)
    torch.testing.assert_close(got.cpu(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.interpreter
def test_products_with_norm_and_residual(both: Both) -> None:
    """As a step of one token has them."""
    x, norm, (chosen, shares) = random(1, HIDDEN), random(HIDDEN), choose(random(1, COUNT + 1), Routing(2))
    wanted = both.plain(rms_norm(x, norm, 1e-3).cpu(), chosen.cpu(), shares.cpu()) + x.cpu()
    inner = mxfp4_few_tokens.gate_up(both.own, x, chosen, ALONE, norm, 1e-3)
    got = mxfp4_few_tokens.down(both.own, inner, chosen, shares, ALONE, residual=x)
    torch.testing.assert_close(got.cpu(), wanted, atol=1e-5, rtol=1e-4)


@triton.jit
def _copy_states(states, out):
    warp = tl.arange(0, 2)
    values = mxfp4_few_tokens._states(states, 64, warp * 128, 192)
    tl.store(out + warp[:, None] * 32 + tl.arange(0, 32)[None, :], values.to(tl.float32))


@pytest.mark.interpreter
def test_states_of_16_bits() -> None:
    """Are in the order of those of 32 bits."""
    states = torch.arange(256, device=DEVICE).bfloat16()
    got, wanted = (torch.empty(2, 32, device=DEVICE) for _ in range(2))
    _copy_states[(1,)](states.view(torch.int32), got)
    _copy_states[(1,)](states.float(), wanted)
    assert torch.equal(got, wanted) and wanted[:, 0].tolist() == [64, 192]


def test_sizes_and_tiles() -> None:
    words = torch.zeros(COUNT, 2, 2 * SIZE, 16, dtype=torch.int32)
    gate_up = Mxfp4Weight(words, words[..., 0])
    down = Mxfp4Weight(words[:, :1, :HIDDEN], words[:, :1, :HIDDEN, 0])
    experts = Experts(gate_up, down, CLAMPED, total=64)
    assert experts.weights.sizes == (COUNT, HIDDEN, SIZE) and experts.weights.dtype == torch.bfloat16
    assert experts.count == COUNT and mxfp4_weight.chunks_of(2880) == 23
    assert experts.tiles(256, 4) == default_tiles(256, 4, 64, in_mxfp4=True) != default_tiles(256, 4, 64)
