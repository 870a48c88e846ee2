"""The gated delta rule against its formula, token by token in float64, however the tokens are cut into steps."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.delta_rule.states import StateBatch, StateShape
from kernels.delta_rule.torch_states import TorchStates

SHAPE = StateShape(key_heads=2, value_heads=4, key_dim=6, value_dim=5, width=4)
ROWS = 12


@dataclass
class Inputs:
    """What the tokens of one sequence put into one layer."""

    x: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    @classmethod
    def random(cls, tokens: int, seed: int) -> "Inputs":
        generator = torch.Generator().manual_seed(seed)
        return cls(
            torch.randn(tokens, SHAPE.channels, generator=generator),
            -2 * torch.rand(tokens, SHAPE.value_heads, generator=generator),
            torch.rand(tokens, SHAPE.value_heads, generator=generator),
        )

    def part(self, first: int, last: int) -> "Inputs":
        return Inputs(self.x[first:last], self.log_decay[first:last], self.beta[first:last])


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
    state = torch.zeros(SHAPE.value_heads, SHAPE.value_dim, SHAPE.key_dim, dtype=torch.float64)
    out = torch.empty_like(v)
    for token in range(len(x)):
        for head in range(SHAPE.value_heads):
            key, query = k[token, head // 2], q[token, head // 2] * SHAPE.key_dim**-0.5
            own = inputs.log_decay[token, head].double().exp() * state[head]
            correction = inputs.beta[token, head].double() * (v[token, head] - own @ key)
            state[head] = own + torch.outer(correction, key)
            out[token, head] = state[head] @ query
    return out


def make(layers: int = 1) -> TorchStates:
    """States full of numbers that no sequence may see."""
    heads = (SHAPE.value_heads, SHAPE.value_dim, SHAPE.key_dim)
    recurrent = torch.full((layers, ROWS, *heads), float("nan"))
    inputs = torch.full((layers, ROWS, SHAPE.channels, SHAPE.width - 1), float("nan"))
    return TorchStates(recurrent, inputs, SHAPE)


def run(
    states: TorchStates, chunks: list[tuple[int, Inputs, int, int]], copies: list[tuple[int, int, int]] | None = None
) -> list[torch.Tensor]:
    """One step: row, inputs, first and last token of each chunk. Returns the outputs of each."""
    rows, starts, ends = np.array([(row, first, last) for row, _, first, last in chunks], dtype=np.int32).T
    states.plan(StateBatch(rows, starts, ends - starts, np.array(copies or [], dtype=np.int32).reshape(-1, 3)))
    parts = [inputs.part(first, last) for _, inputs, first, last in chunks]
    x, log_decay, beta = (torch.cat([getattr(part, name) for part in parts]) for name in ("x", "log_decay", "beta"))
    out = states.attend(0, states.convolve(0, x, WEIGHT), log_decay, beta)
    return list(out.split([last - first for _, _, first, last in chunks]))


@pytest.mark.parametrize("cuts", [[150], [1] * 20, [64, 64, 22], [3, 1, 70, 1, 1, 2]])
def test_chunks_of_any_length(cuts: list[int]) -> None:
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


@pytest.mark.parametrize("before", [1, 2, 70])
def test_another_row_goes_on_from_a_copy(before: int) -> None:
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


def test_a_row_that_is_read_may_be_written_in_the_same_step() -> None:
    states, one = make(), Inputs.random(20, 6)
    run(states, [(3, one, 0, 10)], [(0, 10, 8)])
    (got,) = run(states, [(4, one, 10, 20)], [(0, 0, 8), (0, 5, 8)])
    torch.testing.assert_close(got.double(), formula(one)[10:], atol=2e-5, rtol=1e-4)
    (got,) = run(states, [(5, one, 15, 20)], [(0, 0, 8)])
    torch.testing.assert_close(got.double(), formula(one)[15:], atol=2e-5, rtol=1e-4)


def test_bytes_of_a_row() -> None:
    states = make()
    row = states.recurrent[0, 0].nbytes + states.inputs[0, 0].nbytes
    assert SHAPE.row_bytes(torch.float32) == row
