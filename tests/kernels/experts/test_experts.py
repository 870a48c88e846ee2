"""Routing by its definition, and experts on a CPU against a sum over all of them."""

import pytest
import torch
import torch.nn.functional as F

from kernels.experts.choice import Routing
from kernels.experts.experts import Experts
from kernels.experts.routing import route
from kernels.ops.activation import ClampedSwiGLU, gelu_tanh, gelu_tanh_and_mul, relu2, silu_and_mul

HIDDEN, SIZE, COUNT = 24, 20, 8


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_softmax_over_the_chosen_alone_is_a_normalised_one() -> None:
    logits = random(7, COUNT)
    chosen, weights = route(logits, Routing(3))
    best, places = logits.topk(3)
    assert torch.equal(chosen.long(), places)
    torch.testing.assert_close(weights, best.softmax(-1))


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    logits, bias = random(5, COUNT), torch.zeros(COUNT)
    bias[6] = 10.0
    chosen, weights = route(logits, Routing(2, "sigmoid", is_normalised=False, scale=2.0), bias)
    assert (chosen == 6).sum(1).tolist() == [1] * 5
    torch.testing.assert_close(weights, 2.0 * logits.sigmoid().gather(1, chosen.long()))


def test_groups() -> None:
    """The group with the two best scores is taken, though another has the best one."""
    scores = torch.tensor([[0.9, 0.1, 0.0, 0.0, 0.7, 0.6, 0.2, 0.1]])
    chosen, _ = route(scores.logit(eps=1e-6), Routing(3, "sigmoid", groups=2, groups_kept=1))
    assert sorted(chosen[0].tolist()) == [4, 5, 6]


def test_clamped_swiglu() -> None:
    """Gates have no least value, and ups are clamped on both sides before one is added."""
    gate, up = torch.tensor([-9.0, 0.5, 9.0]), torch.tensor([-9.0, 0.5, 9.0])
    got = ClampedSwiGLU(limit=2.0, alpha=1.5)(torch.cat((gate, up))[None])
    clamped = torch.tensor([-9.0, 0.5, 2.0])
    wanted = clamped * (1.5 * clamped).sigmoid() * (torch.tensor([-2.0, 0.5, 2.0]) + 1)
    torch.testing.assert_close(got, wanted[None])


@pytest.mark.parametrize(
    ("activation", "has_biases"),
    [
        (silu_and_mul, False),
        (gelu_tanh_and_mul, True),
        (ClampedSwiGLU(2.0, 1.7), True),
        (relu2, False),
        (gelu_tanh, True),
    ],
)
@pytest.mark.parametrize(("first", "count"), [(0, COUNT), (3, 4)])
@pytest.mark.parametrize("tokens", [1, 30])
def test_only_the_chosen_experts_count(tokens: int, first: int, count: int, activation, has_biases: bool) -> None:
    rows = SIZE if activation in (relu2, gelu_tanh) else 2 * SIZE
    gate_up, down = random(COUNT, rows, HIDDEN), random(COUNT, HIDDEN, SIZE)
    biases = (random(COUNT, rows), random(COUNT, HIDDEN)) if has_biases else None
    x, (chosen, weights) = random(tokens, HIDDEN), route(random(tokens, COUNT), Routing(3))
    wanted = torch.zeros_like(x)
    for expert in range(first, first + count):
        share = torch.where(chosen == expert, weights, 0.0).sum(1, keepdim=True)
        first_bias, last_bias = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
        wanted += share * F.linear(activation(F.linear(x, gate_up[expert], first_bias)), down[expert], last_bias)
    own = slice(first, first + count)
    own_biases = None if biases is None else (biases[0][own], biases[1][own])
    experts = Experts(gate_up[own], down[own], activation, first, own_biases)
    out = torch.full_like(x, float("nan"))
    torch.testing.assert_close(experts(x, chosen, weights), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(experts(x, chosen, weights, out), wanted, atol=1e-4, rtol=1e-4)


def test_experts_without_tokens_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Experts(random(COUNT, 2 * SIZE, HIDDEN), random(COUNT, HIDDEN, SIZE), silu_and_mul)
    rows: list[int] = []
    experts.activation = lambda gate_up: rows.append(len(gate_up)) or silu_and_mul(gate_up)
    chosen = torch.tensor([[1, 5], [5, 1], [7, 5]], dtype=torch.int32)
    experts(random(3, HIDDEN), chosen, torch.full((3, 2), 0.5))
    assert rows == [2, 3, 1]


def test_another_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="silu, the tanh form of gelu, or a clamped SwiGLU"):
        Experts(random(1, 2, 2), random(1, 2, 1), torch.relu)
