"""The gated delta rule against its formula, token by token in float64, however the tokens are cut into steps: in plain
PyTorch, and by Triton's kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.delta_rule.gated_norm import gated_rms_norm
from kernels.delta_rule.states import DeltaRuleStates, StateBatch, StateShape, TokenGates
from kernels.delta_rule.torch_states import TorchStates

SHAPE = StateShape(key_heads=2, value_heads=4, key_dim=6, value_dim=5, width=4)
ROWS = 12


@dataclass
class Inputs:
    """What the tokens of one sequence put into one layer."""

    x: torch.Tensor
    decay: torch.Tensor
    strength: torch.Tensor

    @classmethod
    def random(cls, tokens: int, seed: int) -> "Inputs":
        generator = torch.Generator().manual_seed(seed)
        return cls(
            torch.randn(tokens, SHAPE.channels, generator=generator),
            4 * torch.rand(tokens, SHAPE.value_heads, generator=generator) - 2,
            2 * torch.randn(tokens, SHAPE.value_heads, generator=generator),
        )

    def part(self, first: int, last: int) -> "Inputs":
        return Inputs(self.x[first:last], self.decay[first:last], self.strength[first:last])


DECAY_LOG, DECAY_BIAS = torch.tensor([0.1, -0.7, 0.3, -3.0]), torch.tensor([-0.5, 0.2, 0.0, 0.4])
WEIGHT = torch.randn(SHAPE.channels, SHAPE.width, generator=torch.Generator().manual_seed(1))


def formula(inputs: Inputs) -> torch.Tensor:
    """The outputs of all tokens of a sequence, float64 `[n, value_heads, value_dim]`."""
    x, weight = inputs.x.double(), WEIGHT.double()
    seen = F.pad(x, (0, 0, SHAPE.width - 1, 0))
    mixed = F.silu(sum(seen[i : i + len(x)] * weight[:, i] for i in range(SHAPE.width)))
    size = SHAPE.key_heads * SHAPE.key_dim
    q, k = (
        part.unflatten(1, (SHAPE.key_heads, SHAPE.key_dim)) for part in (mixed[:, :size], mixed[:, size : 2 * size])
    )
    v = mixed[:, 2 * size :].unflatten(1, (SHAPE.value_heads, SHAPE.value_dim))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    log_decay = -DECAY_LOG.double().exp() * F.softplus(inputs.decay.double() + DECAY_BIAS)
    beta = inputs.strength.double().sigmoid()
    state = torch.zeros(SHAPE.value_heads, SHAPE.value_dim, SHAPE.key_dim, dtype=torch.float64)
    out = torch.empty_like(v)
    for token in range(len(x)):
        for head in range(SHAPE.value_heads):
            key, query = k[token, head // 2], q[token, head // 2] * SHAPE.key_dim**-0.5
            own = log_decay[token, head].exp() * state[head]
            correction = beta[token, head] * (v[token, head] - own @ key)
            state[head] = own + torch.outer(correction, key)
            out[token, head] = state[head] @ query
    return out


Make = Callable[..., DeltaRuleStates]


@pytest.fixture(
    params=[
        pytest.param(("torch", "cpu"), id="torch"),
        pytest.param(("triton", "cpu"), id="interpreter", marks=pytest.mark.interpreter),
        pytest.param(("triton", "cuda"), id="cuda", marks=pytest.mark.gpu),
    ]
)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes states full of numbers that no sequence may see."""
    kind, device = request.param
    if kind == "torch":
        states: Any = TorchStates
    else:
        from kernels.delta_rule.triton_states import TritonStates

        states = TritonStates

    def make_states(layers: int = 1) -> DeltaRuleStates:
        heads = (SHAPE.value_heads, SHAPE.value_dim, SHAPE.key_dim)
        recurrent = torch.full((layers, ROWS, *heads), float("nan"), device=device)
        inputs = torch.full((layers, ROWS, SHAPE.channels, SHAPE.width - 1), float("nan"), device=device)
        return states(recurrent, inputs, SHAPE)

    return make_states


def run(
    states: DeltaRuleStates,
    chunks: list[tuple[int, Inputs, int, int]],
    copies: list[tuple[int, int, int]] | None = None,
) -> list[torch.Tensor]:
    """One step: row, inputs, first and last token of each chunk. Returns the outputs of each."""
    rows, starts, ends = np.array([(row, first, last) for row, _, first, last in chunks], dtype=np.int32).T
    batch = StateBatch(rows, starts, ends - starts, np.array(copies or [], dtype=np.int32).reshape(-1, 3))
    states.plan(batch)
    return attended(states, [inputs.part(first, last) for _, inputs, first, last in chunks])


def attended(states: DeltaRuleStates, parts: list[Inputs]) -> list[torch.Tensor]:
    """The outputs of the parts in a planned step. All inputs are columns of one tensor, as in a model."""
    columns = torch.cat([torch.cat((part.x, part.strength, part.decay), 1) for part in parts]).to(states.device)
    x, strength, decay = columns.split((SHAPE.channels, SHAPE.value_heads, SHAPE.value_heads), 1)
    gates = TokenGates(decay, strength, DECAY_LOG.to(states.device), DECAY_BIAS.to(states.device))
    out = states.attend(0, states.convolve(0, x, WEIGHT.to(states.device)), gates)
    return list(out.cpu().split([len(part.x) for part in parts]))


@pytest.mark.parametrize("cuts", [[150], [1] * 20, [64, 64, 22], [3, 1, 70, 1, 1, 2]])
def test_chunks_of_any_length(make: Make, cuts: list[int]) -> None:
    """Beside another sequence, whose chunks have other lengths."""
    states, total = make(), sum(cuts)
    one, other = Inputs.random(total, 2), Inputs.random(200, 3)
    outs, others, at, beside = [], [], 0, 0
    for number, size in enumerate(cuts):
        second = 1 + 6 * (number % 2)
        got = run(states, [(4, one, at, at + size), (7, other, beside, beside + second)])
        outs.append(got[0])
        others.append(got[1])
        at, beside = at + size, beside + second
    torch.testing.assert_close(torch.cat(outs).double(), formula(one), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(others).double(), formula(other.part(0, beside)), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [(4, 5, 6), (6, 4, 5), (4, 6, 7)])
def test_tokens_of_many_sequences_at_once(make: Make, rows: tuple[int, ...]) -> None:
    """In rows next to each other, in another order, and apart."""
    states, each = make(), [Inputs.random(6, 10 + row) for row in rows]
    outs = [
        run(states, [(row, one, at, at + 1) for row, one in zip(rows, each, strict=True)], [(1, 1, 2)])
        for at in range(6)
    ]
    for i, one in enumerate(each):
        got = torch.cat([out[i] for out in outs])
        torch.testing.assert_close(got.double(), formula(one), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states.recurrent[0, 2], states.recurrent[0, rows[1]])


@pytest.mark.parametrize("before", [1, 2, 70])
def test_another_row_goes_on_from_a_copy(make: Make, before: int) -> None:
    """States copied inside a chunk, at its end, and after a chunk of one token, which stands last in the step."""
    states, one, other = make(2), Inputs.random(140, 4), Inputs.random(60, 5)
    run(states, [(3, one, 0, 40), (6, other, 0, 59)], [(0, before if before < 40 else 40, 8), (0, 40, 9)])
    run(states, [(3, one, 40, 139), (6, other, 59, 60)], [(0, max(1, before - 40), 10), (0, 99, 1), (1, 1, 11)])
    run(states, [(3, one, 139, 140)], [(0, 1, 0)])
    formula_of_one = formula(one)
    inside = before if before < 40 else 40
    for source, at in ((8, inside), (9, 40), (10, 40 + max(1, before - 40)), (1, 139)):
        (got,) = run(states, [(5, one, at, 140)], [(0, 0, source)])
        torch.testing.assert_close(got.double(), formula_of_one[at:], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states.recurrent[0, 0], states.recurrent[0, 3])
    torch.testing.assert_close(states.recurrent[0, 11], states.recurrent[0, 6])
    torch.testing.assert_close(states.inputs[0, 11], states.inputs[0, 6])


def test_a_row_that_is_read_may_be_written_in_the_same_step(make: Make) -> None:
    states, one = make(), Inputs.random(20, 6)
    run(states, [(3, one, 0, 10)], [(0, 10, 8)])
    (got,) = run(states, [(4, one, 10, 20)], [(0, 0, 8), (0, 5, 8)])
    torch.testing.assert_close(got.double(), formula(one)[10:], atol=2e-5, rtol=1e-4)
    (got,) = run(states, [(5, one, 15, 20)], [(0, 0, 8)])
    torch.testing.assert_close(got.double(), formula(one)[15:], atol=2e-5, rtol=1e-4)


def test_bytes_of_a_row(make: Make) -> None:
    states = make()
    row = states.recurrent[0, 0].nbytes + states.inputs[0, 0].nbytes
    assert SHAPE.row_bytes(torch.float32) == row


@pytest.mark.interpreter
def test_decodes_planned_on_the_device() -> None:
    """As in a CUDA graph: rows and copies are tensors, and the last row is padding."""
    from kernels.delta_rule.triton_states import TritonStates, copies_of_singles

    heads = (SHAPE.value_heads, SHAPE.value_dim, SHAPE.key_dim)
    states = TritonStates(torch.zeros(1, ROWS, *heads), torch.zeros(1, ROWS, SHAPE.channels, SHAPE.width - 1), SHAPE)
    one, other, padding = Inputs.random(9, 8), Inputs.random(9, 9), Inputs.random(2, 10)
    outs = []
    for at in range(9):
        batch = StateBatch(
            np.array([5, 3], dtype=np.int32),
            np.array([at, at], dtype=np.int32),
            np.ones(2, dtype=np.int32),
            np.array([[1, 1, 7]] if at == 4 else [], dtype=np.int32).reshape(-1, 3),
        )
        states.begin(batch)
        copies = torch.from_numpy(np.append(copies_of_singles(batch), [-1, -1]))
        states.plan_decodes(torch.arange(4), torch.tensor([5, 3, ROWS - 1, ROWS - 1]), copies)
        parts = [one.part(at, at + 1), other.part(at, at + 1), padding]
        outs.append(torch.cat(attended(states, parts)[:2]))
    got = torch.stack(outs, 1).double()
    torch.testing.assert_close(got[0], formula(one), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got[1], formula(other), atol=2e-5, rtol=1e-4)
    (again,) = run(states, [(8, other, 5, 9)], [(0, 0, 7)])
    torch.testing.assert_close(again.double(), formula(other)[5:], atol=2e-5, rtol=1e-4)


@pytest.mark.interpreter
def test_the_gated_norm() -> None:
    from kernels.delta_rule import decode_kernels

    columns, weight = torch.randn(3, 7 + 4 * 5), torch.rand(5)
    x, gate = torch.randn(3, 4, 5), columns[:, 7:]
    got = decode_kernels.gated_rms_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(got, gated_rms_norm(x, gate, weight, 1e-6))
