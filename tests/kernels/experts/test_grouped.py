"""The Triton kernels of experts against PyTorch: routing, sorting, and both ways to compute the products."""

import pytest
import torch

from kernels.experts.choice import Routing, choose
from kernels.experts.experts import Experts
from kernels.experts.tiles import EACH_PAIR, ExpertTiles, ProductTile
from kernels.experts.weights import ExpertWeights
from kernels.ops.activation import ClampedSwiGLU, gelu_tanh_and_mul, silu_and_mul

pytest.importorskip("triton")

from kernels.experts import grouped, routing_kernel

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HIDDEN, SIZE, COUNT = 40, 24, 6
TILES = ExpertTiles(16, ProductTile(16, 16, 4, 2), ProductTile(32, 32, 4, 2))
ALONE = ExpertTiles(EACH_PAIR, ProductTile(4, 32, 4, 1), ProductTile(8, 16, 4, 1))


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
        Routing(3, "sigmoid", scale=2.5, least_sum=1e-20),
        Routing(2, "sigmoid", groups=2, groups_kept=1),
    ],
)
def test_routing(routing: Routing, has_bias: bool) -> None:
    logits, bias = random(5, COUNT), random(COUNT + 1)[1:].contiguous() if has_bias else None
    chosen, weights = routing_kernel.route(logits, routing, bias)
    wanted = choose(logits, routing, bias)
    assert torch.equal(chosen, wanted[0])
    torch.testing.assert_close(weights, wanted[1])


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
@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul])
@pytest.mark.parametrize(("first", "count"), [(0, COUNT), (2, 3)])
@pytest.mark.parametrize(("tokens", "tiles"), [(1, TILES), (50, TILES), (1, ALONE), (3, ALONE)])
def test_products(tokens: int, tiles: ExpertTiles, first: int, count: int, activation) -> None:
    gate_up, down = 0.2 * random(COUNT, 2 * SIZE, HIDDEN), 0.2 * random(COUNT, HIDDEN, SIZE)
    own = slice(first, first + count)
    x, (chosen, shares) = random(tokens, HIDDEN), routed(tokens)
    wanted = Experts(gate_up[own].cpu(), down[own].cpu(), activation, first)(x.cpu(), chosen.cpu(), shares.cpu())
    weights = ExpertWeights(gate_up[own].contiguous(), down[own].contiguous(), first, activation is gelu_tanh_and_mul)
    got = grouped.experts(weights, x, chosen, shares, tiles)
    torch.testing.assert_close(got.cpu(), wanted, atol=1e-5, rtol=1e-4)
    out = torch.full_like(x, float("nan"))
    assert grouped.experts(weights, x, chosen, shares, tiles, out) is out and torch.equal(out, got)


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


@pytest.mark.parametrize(("pairs", "experts", "rows", "most"), [(1, 8, 16, 1), (8, 128, 16, 8), (2048, 128, 16, 248)])
def test_number_of_blocks(pairs: int, experts: int, rows: int, most: int) -> None:
    assert grouped.most_blocks(pairs, experts, rows) == most
