"""The Triton kernels of experts against PyTorch: routing, sorting, and both ways to compute the products."""

import pytest
import torch

from kernels.experts.choice import Routing, choose
from kernels.experts.experts import Experts
from kernels.experts.tiles import EACH_PAIR, ExpertTiles, ProductTile
from kernels.experts.weights import ExpertWeights
from kernels.linear.fp8_linear import Fp8Weight, by_column, quantize, quantize_groups
from kernels.ops.activation import ClampedSwiGLU, gelu_tanh, gelu_tanh_and_mul, relu2, silu_and_mul
from kernels.ops.norm import rms_norm
from tests.kernels.covering import EVERY, covering
from tests.kernels.device import DEVICE

pytest.importorskip("triton")

from kernels.experts import few_tokens, grouped, routing_kernel

HIDDEN, SIZE, COUNT = 40, 24, 6
TILES = ExpertTiles(16, ProductTile(16, 16, 4, 2), ProductTile(32, 32, 4, 2))
ALONE = ExpertTiles(EACH_PAIR, ProductTile(8, 32, 4, 1), ProductTile(16, 16, 4, 1))
# Several tiles of whole rows a program, of which the last ends beyond the weight, and all weights read ahead.
LOOPED = ExpertTiles(EACH_PAIR, ProductTile(9, 64, 1, 1), ProductTile(1, 32, 1, 9))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def routed(tokens: int, top_k: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return choose(random(tokens, COUNT), Routing(top_k))


@pytest.mark.interpreter
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(1),
        Routing(3, is_normalised=False),
        Routing(3, "sigmoid", scale=2.5, added_to_sum=0.1),
        Routing(2, "sigmoid", groups=2, groups_kept=1),
    ],
)
def test_routing(routing: Routing, has_bias: bool) -> None:
    logits, bias = random(5, COUNT), random(COUNT + 1)[1:].contiguous() if has_bias else None
    load = torch.zeros(COUNT, dtype=torch.int64, device=DEVICE)
    chosen, weights = routing_kernel.route(logits, routing, bias, load=load)
    wanted = choose(logits, routing, bias)
    assert torch.equal(chosen, wanted[0])
    torch.testing.assert_close(weights, wanted[1])
    assert torch.equal(load, torch.bincount(chosen.flatten(), minlength=COUNT))


@pytest.mark.interpreter
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("routing", [Routing(3, scale=2.5), Routing(2, "sigmoid", groups=2, groups_kept=1)])
def test_experts_that_every_token_has(routing: Routing, gated: bool) -> None:
    """Come after those that the router chooses, with weights that are not scaled."""
    logits = random(5, COUNT + gated)
    chosen, weights = routing_kernel.route(logits, routing, always=2, gated=gated)
    wanted = choose(logits[:, :COUNT], routing)
    assert torch.equal(chosen[:, :-2], wanted[0])
    torch.testing.assert_close(weights[:, :-2], wanted[1])
    assert chosen[:, -2:].tolist() == [[COUNT, COUNT + 1]] * 5
    share = logits[:, COUNT:].sigmoid() if gated else torch.ones(5, 1, device=DEVICE)
    torch.testing.assert_close(weights[:, -2:], share.expand(-1, 2))


@pytest.mark.interpreter
def test_products_with_norm_and_residual() -> None:
    """As a step of one token has them."""
    weights = ExpertWeights(0.2 * random(COUNT, 2 * SIZE, HIDDEN), 0.2 * random(COUNT, HIDDEN, SIZE), 0, False)
    x, norm, (chosen, shares) = random(2, HIDDEN), random(HIDDEN), routed(2)
    plain = few_tokens.experts(weights, rms_norm(x, norm, 1e-3), chosen, shares, ALONE)
    got = few_tokens.experts(weights, x, chosen, shares, ALONE, norm=norm, eps=1e-3, residual=x)
    torch.testing.assert_close(got, plain + x, atol=1e-5, rtol=1e-4)


@pytest.mark.interpreter
@pytest.mark.parametrize(("first", "count"), [(0, COUNT), (2, 3)])
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_sorting(tokens: int, first: int, count: int) -> None:
    """Every pair of the experts that are here is in one block of its expert, and no block is empty or too long."""
    chosen, _ = routed(tokens)
    rows = 16
    blocks = grouped.sort_pairs(chosen, first, count, rows)
    by_expert = chosen.flatten().tolist()
    found: list[int] = []
    for expert, begin, length in zip(*(part.tolist() for part in blocks[1:]), strict=True):
        if expert >= 0:
            assert 0 < length <= rows and begin == len(found)
            pairs = blocks.pairs[begin : begin + length].tolist()
            assert {by_expert[pair] for pair in pairs} == {first + expert}
            found += pairs
    assert sorted(found) == [pair for pair, own in enumerate(by_expert) if first <= own < first + count]


@pytest.mark.interpreter
@covering(
    {
        "tokens, tiles": [(1, TILES), (50, TILES), (1, ALONE), (3, ALONE), (2, LOOPED)],
        "first, count": [(0, COUNT), (2, 3)],
        "activation": [silu_and_mul, gelu_tanh_and_mul],
    }
)
def test_products(tokens: int, tiles: ExpertTiles, first: int, count: int, activation) -> None:
    gate_up, down = 0.2 * random(COUNT, 2 * SIZE, HIDDEN), 0.2 * random(COUNT, HIDDEN, SIZE)
    own = slice(first, first + count)
    x, (chosen, shares) = random(tokens, HIDDEN), routed(tokens)
    wanted = Experts(gate_up[own].cpu(), down[own].cpu(), activation, first)(x.cpu(), chosen.cpu(), shares.cpu())
    weights = ExpertWeights(gate_up[own].contiguous(), down[own].contiguous(), first, activation is gelu_tanh_and_mul)
    out = torch.full_like(x, float("nan"))
    assert grouped.experts(weights, x, chosen, shares, tiles, out) is out
    torch.testing.assert_close(out.cpu(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.interpreter
@pytest.mark.parametrize(("tokens", "tiles"), [(50, TILES), (3, ALONE)])
def test_products_with_biases_of_a_clamped_swiglu(tokens: int, tiles: ExpertTiles) -> None:
    first, own = 2, slice(2, 5)
    gate_up, down = 0.2 * random(COUNT, 2 * SIZE, HIDDEN)[own], 0.2 * random(COUNT, HIDDEN, SIZE)[own]
    biases = random(COUNT, 2 * SIZE)[own].contiguous(), random(COUNT, HIDDEN)[own].contiguous()
    x, (chosen, shares), clamped = random(tokens, HIDDEN), routed(tokens), ClampedSwiGLU(1.0, 1.7)
    in_full = Experts(gate_up.cpu(), down.cpu(), clamped, first, (biases[0].cpu(), biases[1].cpu()))
    weights = ExpertWeights(gate_up.contiguous(), down.contiguous(), first, False, clamped, *biases)
    got = grouped.experts(weights, x, chosen, shares, tiles)
    torch.testing.assert_close(got.cpu(), in_full(x.cpu(), chosen.cpu(), shares.cpu()), atol=1e-5, rtol=1e-4)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("tokens", "tiles", "activation"),
    [(50, TILES, relu2), (50, TILES, gelu_tanh), (3, ALONE, gelu_tanh), (2, LOOPED, relu2)],
)
def test_products_without_a_gate(tokens: int, tiles: ExpertTiles, activation) -> None:
    """With biases too, which gelu has here."""
    first, own, is_gelu = 2, slice(2, 5), activation is gelu_tanh
    up, down = 0.2 * random(COUNT, SIZE, HIDDEN)[own], 0.2 * random(COUNT, HIDDEN, SIZE)[own]
    biases = (random(COUNT, SIZE)[own].contiguous(), random(COUNT, HIDDEN)[own].contiguous()) if is_gelu else None
    x, (chosen, shares) = random(tokens, HIDDEN), routed(tokens)
    in_full = Experts(up.cpu(), down.cpu(), activation, first, biases)
    of_biases = (None, None) if biases is None else biases
    weights = ExpertWeights(up.contiguous(), down.contiguous(), first, is_gelu, None, *of_biases, is_gated=False)
    got = grouped.experts(weights, x, chosen, shares, tiles)
    torch.testing.assert_close(got.cpu(), in_full(x.cpu(), chosen.cpu(), shares.cpu()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("pairs", "experts", "rows", "most"), [(1, 8, 16, 1), (8, 128, 16, 8), (2048, 128, 16, 248)])
def test_number_of_blocks(pairs: int, experts: int, rows: int, most: int) -> None:
    assert grouped.most_blocks(pairs, experts, rows) == most


WIDE = ExpertTiles(EACH_PAIR, ProductTile(64, 256, 4, 1), ProductTile(64, 128, 4, 1))
DEEP = ExpertTiles(16, ProductTile(32, 64, 4, 2), ProductTile(64, 128, 4, 2))


@pytest.mark.interpreter
@pytest.mark.parametrize(("has_groups", "activation"), [(False, silu_and_mul), (True, silu_and_mul), (True, relu2)])
@pytest.mark.parametrize(("tokens", "tiles"), [(40 if EVERY else 20, DEEP), (2, WIDE)])
def test_products_of_weights_in_8_bits(tokens: int, tiles: ExpertTiles, has_groups: bool, activation) -> None:
    """Activations are not rounded. The last group of columns is shorter than the others."""
    hidden, size, first, count = 200, 144, 2, 3
    rounding = quantize_groups if has_groups else quantize
    weights, plain = [], []
    first_rows = size if activation is relu2 else 2 * size
    for rows, columns in ((first_rows, hidden), (hidden, size)):
        each = [rounding(0.2 * random(rows, columns + expert)[:, expert:]) for expert in range(count)]
        weights.append(Fp8Weight(*(torch.stack([part[i] for part in each]) for i in range(2))))
        plain.append(torch.stack([values.float() * by_column(scales, columns) for values, scales in each]))
    x, (chosen, shares) = random(tokens, hidden), routed(tokens)
    wanted = Experts(*(part.cpu() for part in plain), activation, first)(x.cpu(), chosen.cpu(), shares.cpu())
    own = Experts(weights[0], weights[1], activation, first).weights
    assert own.dtype == torch.bfloat16 and own.gate_up.dtype == torch.uint8
    got = grouped.experts(own, x, chosen, shares, tiles)
    largest = max(1.0, float(wanted.abs().max()))  # squares are large
    torch.testing.assert_close(got.cpu(), wanted, atol=1e-5 * largest, rtol=1e-4)


@pytest.mark.interpreter
def test_every_number_of_8_bits() -> None:
    """Experts of one weight, which is each of the numbers but for not-a-number."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    values = codes.view(torch.float8_e4m3fn)
    down = torch.zeros(1, len(codes), 16, dtype=torch.uint8, device=DEVICE)
    down[0, :, 0] = codes
    ones = torch.ones(1, 32, len(codes), device=DEVICE)
    own = Experts(
        ones, Fp8Weight(down.view(torch.float8_e4m3fn), torch.ones(1, len(codes), 1, device=DEVICE)), silu_and_mul
    )
    x = torch.full((1, len(codes)), 1.0 / len(codes), device=DEVICE)
    chosen = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    got = grouped.experts(own.weights, x, chosen, torch.ones(1, 1, device=DEVICE), ALONE)[0]
    torch.testing.assert_close(got, values.float() * silu_and_mul(torch.ones(1, 2, device=DEVICE))[0, 0])
