"""Recurrences, and a convolution without one, against their formulas, token by token in float64, however the tokens are
cut into steps: in plain PyTorch, and by Triton's kernels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.delta_rule.gated_norm import gated_rms_norm
from kernels.delta_rule.gates import TokenGates
from kernels.delta_rule.rule import DeltaRule
from kernels.recurrent.recurrence import ConvolutionGates, Recurrence
from kernels.recurrent.shape import StateShape
from kernels.recurrent.states import RecurrentStates, StateBatch
from kernels.recurrent.torch_states import TorchStates
from kernels.ssd.recurrence import Ssd, SsdParameters
from tests.kernels.covering import EVERY

SHAPE = StateShape(key_heads=2, value_heads=4, key_dim=6, value_dim=5, width=4)
HEADS = SHAPE.value_heads
ROWS = 12


class Rule:
    """A layer with a gated delta net. A token puts in `x`, and a strength and a decay for each head."""

    numbers = 2 * HEADS  # that a token puts in besides `x`
    bias: torch.Tensor | None = None
    shape = SHAPE

    def __init__(self) -> None:
        self.decay_log, self.decay_bias = torch.tensor([0.1, -0.7, 0.3, -3.0]), torch.tensor([-0.5, 0.2, 0.0, 0.4])
        self.weight = torch.randn(SHAPE.channels, SHAPE.width, generator=torch.Generator().manual_seed(1))

    def outputs(self, states: RecurrentStates, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Those of the tokens of a planned step."""
        mixed = states.convolve(0, x, *self.convolution(x.device))
        return states.update(0, self.recurrence(mixed, numbers))

    def convolution(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.weight.to(device), None if self.bias is None else self.bias.to(device)

    def recurrence(self, mixed: torch.Tensor, numbers: torch.Tensor) -> Recurrence:
        strength, decay = numbers.split(HEADS, 1)
        return DeltaRule(mixed, SHAPE, TokenGates(decay, strength, *self.on(mixed.device)))

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return self.decay_log.to(device), self.decay_bias.to(device)

    def formula(self, inputs: "Inputs") -> torch.Tensor:
        """The outputs of all tokens of a sequence, float64 `[n, value_heads, value_dim]`."""
        return self.of_mixed(F.silu(self.convolved(inputs.x.double())), inputs.numbers.double())

    def convolved(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.double()
        seen = F.pad(x, (0, 0, SHAPE.width - 1, 0))
        mixed = sum(seen[i : i + len(x)] * weight[:, i] for i in range(SHAPE.width))
        return mixed if self.bias is None else mixed + self.bias

    def of_mixed(self, mixed: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        size = SHAPE.key_heads * SHAPE.key_dim
        q, k, v = mixed.split((size, size, HEADS * SHAPE.value_dim), 1)
        q, k, v = (part.unflatten(1, (heads, -1)) for part, heads in ((q, 2), (k, 2), (v, HEADS)))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        log_decay = -self.decay_log.double().exp() * F.softplus(numbers[:, HEADS:] + self.decay_bias)
        beta = numbers[:, :HEADS].sigmoid()
        state = torch.zeros(HEADS, SHAPE.value_dim, SHAPE.key_dim, dtype=torch.float64)
        out = torch.empty_like(v)
        for token in range(len(mixed)):
            for head in range(HEADS):
                key, query = k[token, head // 2], q[token, head // 2] * SHAPE.key_dim**-0.5
                own = log_decay[token, head].exp() * state[head]
                correction = beta[token, head] * (v[token, head] - own @ key)
                state[head] = own + torch.outer(correction, key)
                out[token, head] = state[head] @ query
        return out


class Mamba2Rule(Rule):
    """A layer with Mamba2. A token puts in `x`, and gates and a step for each head."""

    numbers = HEADS * SHAPE.value_dim + HEADS

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.linspace(-0.5, 0.5, SHAPE.channels)
        self.skip = torch.tensor([0.3, -1.0, 0.0, 2.0])

    def recurrence(self, mixed: torch.Tensor, numbers: torch.Tensor) -> Recurrence:
        gate, steps = numbers.split((HEADS * SHAPE.value_dim, HEADS), 1)
        return Ssd(mixed, SHAPE, steps, gate, SsdParameters(*self.on(mixed.device), self.skip.to(mixed.device)))

    def of_mixed(self, mixed: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        size = SHAPE.key_heads * SHAPE.key_dim
        x, b, c = mixed.split((HEADS * SHAPE.value_dim, size, size), 1)
        x, b, c = (part.unflatten(1, (heads, -1)) for part, heads in ((x, HEADS), (b, 2), (c, 2)))
        gate = F.silu(numbers[:, :-HEADS]).unflatten(1, (HEADS, -1))
        steps = F.softplus(numbers[:, -HEADS:] + self.decay_bias)
        state = torch.zeros(HEADS, SHAPE.value_dim, SHAPE.key_dim, dtype=torch.float64)
        out = torch.empty_like(x)
        for token in range(len(mixed)):
            for head in range(HEADS):
                step, own = steps[token, head], x[token, head]
                decay = (-self.decay_log[head].double().exp() * step).exp()
                state[head] = decay * state[head] + step * torch.outer(own, b[token, head // 2])
                out[token, head] = state[head] @ c[token, head // 2] + self.skip[head] * own
        return out * gate


class Convolution(Rule):
    """A layer with a short convolution alone. A token puts in `x`, and gates of inputs and of outputs."""

    numbers = 2 * SHAPE.channels
    shape = StateShape(key_heads=11, value_heads=11, key_dim=0, value_dim=4, width=SHAPE.width)

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.linspace(-0.5, 0.5, SHAPE.channels)

    def outputs(self, states: RecurrentStates, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        gates = ConvolutionGates(*numbers.split(SHAPE.channels, 1))
        return states.convolve(0, x, *self.convolution(x.device), gates)

    def formula(self, inputs: "Inputs") -> torch.Tensor:
        """`[n, channels]`."""
        before, after = inputs.numbers.double().split(SHAPE.channels, 1)
        return after * self.convolved(before * inputs.x)


@pytest.fixture(params=[Rule, Mamba2Rule, Convolution])
def rule(request: pytest.FixtureRequest) -> Rule:
    made: Rule = request.param()
    return made


@dataclass
class Inputs:
    """What the tokens of one sequence put into one layer."""

    rule: Rule
    x: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def random(cls, rule: Rule, tokens: int, seed: int) -> "Inputs":
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, SHAPE.channels, generator=generator)
        return cls(rule, x, 1.5 * torch.randn(tokens, rule.numbers, generator=generator))

    def part(self, first: int, last: int) -> "Inputs":
        return replace(self, x=self.x[first:last], numbers=self.numbers[first:last])

    def formula(self) -> torch.Tensor:
        return self.rule.formula(self)


Make = Callable[..., RecurrentStates]


@pytest.fixture(
    params=[
        pytest.param(("torch", "cpu"), id="torch"),
        pytest.param(("triton", "cpu"), id="interpreter", marks=pytest.mark.interpreter),
        pytest.param(("triton", "cuda"), id="cuda", marks=pytest.mark.gpu),
    ]
)
def make(request: pytest.FixtureRequest, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes states full of numbers that no sequence may see."""
    kind, device = request.param
    if kind == "torch":
        states: Any = TorchStates
    else:
        from kernels.recurrent import convolution_kernels
        from kernels.recurrent.triton_states import TritonStates

        states = TritonStates
        if device == "cpu":
            # Two programs a block, where the GPU has eight.
            monkeypatch.setattr(convolution_kernels, "_TOKENS", 32)

    def make_states(layers: int = 1) -> RecurrentStates:
        recurrent = torch.full((layers, ROWS, *heads_of(rule.shape)), float("nan"), device=device)
        inputs = torch.full((layers, ROWS, SHAPE.channels, SHAPE.width - 1), float("nan"), device=device)
        return states(recurrent, inputs, rule.shape)

    return make_states


def heads_of(shape: StateShape) -> tuple[int, int, int]:
    return shape.value_heads, shape.value_dim, shape.key_dim


def run(
    states: RecurrentStates,
    chunks: list[tuple[int, Inputs, int, int]],
    copies: list[tuple[int, int, int]] | None = None,
) -> list[torch.Tensor]:
    """One step: row, inputs, first and last token of each chunk. Returns the outputs of each."""
    rows, starts, ends = np.array([(row, first, last) for row, _, first, last in chunks], dtype=np.int32).T
    batch = StateBatch(rows, starts, ends - starts, np.array(copies or [], dtype=np.int32).reshape(-1, 3))
    states.plan(batch)
    return attended(states, [inputs.part(first, last) for _, inputs, first, last in chunks])


def attended(states: RecurrentStates, parts: list[Inputs]) -> list[torch.Tensor]:
    """The outputs of the parts in a planned step. All inputs are columns of one tensor, as in a model."""
    rule = parts[0].rule
    columns = torch.cat([torch.cat((part.x, part.numbers), 1) for part in parts]).to(states.device)
    x, numbers = columns.split((SHAPE.channels, rule.numbers), 1)
    return list(rule.outputs(states, x, numbers).cpu().split([len(part.x) for part in parts]))


@pytest.mark.parametrize("cuts", [[150], [1] * (20 if EVERY else 6), [64, 65], [3, 1, 66, 1, 1, 2]])
def test_chunks_of_any_length(make: Make, rule: Rule, cuts: list[int]) -> None:
    """Beside another sequence, whose chunks have other lengths."""
    states, total = make(), sum(cuts)
    one, other = Inputs.random(rule, total, 2), Inputs.random(rule, 200, 3)
    outs, others, at, beside = [], [], 0, 0
    for number, size in enumerate(cuts):
        second = 1 + 6 * (number % 2)
        got = run(states, [(4, one, at, at + size), (7, other, beside, beside + second)])
        outs.append(got[0])
        others.append(got[1])
        at, beside = at + size, beside + second
    torch.testing.assert_close(torch.cat(outs).double(), one.formula(), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(others).double(), other.part(0, beside).formula(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [(4, 5, 6), (7, 4, 5)])
def test_tokens_of_many_sequences_at_once(make: Make, rule: Rule, rows: tuple[int, ...]) -> None:
    """In rows next to each other; in another order, and apart."""
    tokens = SHAPE.width + 1
    states, each = make(), [Inputs.random(rule, tokens, 10 + row) for row in rows]
    outs = [
        run(states, [(row, one, at, at + 1) for row, one in zip(rows, each, strict=True)], [(1, 1, 2)])
        for at in range(tokens)
    ]
    for i, one in enumerate(each):
        got = torch.cat([out[i] for out in outs])
        torch.testing.assert_close(got.double(), one.formula(), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states.recurrent[0, 2], states.recurrent[0, rows[1]])


@pytest.mark.parametrize(
    ("rule", "before"),
    [
        pytest.param(Rule, 1, marks=pytest.mark.slow),
        pytest.param(Rule, 84, marks=pytest.mark.slow),
        (Mamba2Rule, 2),
        (Mamba2Rule, 84),
        (Convolution, 2),
    ],
    indirect=["rule"],
)
def test_another_row_goes_on_from_a_copy(make: Make, rule: Rule, before: int) -> None:
    """States copied inside a chunk, after a whole block of it (84 is 20 and 64), at its end, and after a chunk of one
    token, which stands last in the step."""
    states, one, other = make(2), Inputs.random(rule, 96, 4), Inputs.random(rule, 15, 5)
    first, later = min(before, 20), 20 + max(1, before - 20)
    run(states, [(3, one, 0, 20), (6, other, 0, 14)], [(0, first, 8), (0, 20, 9)])
    run(states, [(3, one, 20, 95), (6, other, 14, 15)], [(0, later - 20, 10), (0, 75, 1), (1, 1, 11)])
    run(states, [(3, one, 95, 96)], [(0, 1, 0)])
    copies = [(0, 0, 8), (1, 0, 9), (2, 0, 10), (3, 0, 1)]
    parts = [(first, first + 5), (20, 25), (later, later + 5), (95, 96)]
    outs = run(states, [(row, one, *part) for row, part in zip((2, 4, 5, 7), parts, strict=True)], copies)
    formula_of_one = one.formula()
    for got, part in zip(outs, parts, strict=True):
        torch.testing.assert_close(got.double(), formula_of_one[slice(*part)], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states.recurrent[0, 0], states.recurrent[0, 3])
    torch.testing.assert_close(states.recurrent[0, 11], states.recurrent[0, 6])
    torch.testing.assert_close(states.inputs[0, 11], states.inputs[0, 6])


def test_a_row_that_is_read_may_be_written_in_the_same_step(make: Make, rule: Rule) -> None:
    states, one = make(), Inputs.random(rule, 20, 6)
    run(states, [(3, one, 0, 10)], [(0, 10, 8)])
    (got,) = run(states, [(4, one, 10, 20)], [(0, 0, 8), (0, 5, 8)])
    torch.testing.assert_close(got.double(), one.formula()[10:], atol=2e-5, rtol=1e-4)
    (got,) = run(states, [(5, one, 15, 20)], [(0, 0, 8)])
    torch.testing.assert_close(got.double(), one.formula()[15:], atol=2e-5, rtol=1e-4)


def test_bytes_of_a_row(make: Make, rule: Rule) -> None:
    states = make()
    row = states.recurrent[0, 0].nbytes + states.inputs[0, 0].nbytes
    assert rule.shape.row_bytes(torch.float32) == row


@pytest.mark.interpreter
def test_decodes_planned_on_the_device(rule: Rule) -> None:
    """As in a CUDA graph: rows and copies are tensors, and the last row is padding."""
    from kernels.recurrent.triton_states import TritonStates, copies_of_singles

    recurrent = torch.zeros(1, ROWS, *heads_of(rule.shape))
    states = TritonStates(recurrent, torch.zeros(1, ROWS, SHAPE.channels, SHAPE.width - 1), rule.shape)
    one, other, padding = Inputs.random(rule, 6, 8), Inputs.random(rule, 6, 9), Inputs.random(rule, 2, 10)
    outs = []
    for at in range(6):
        batch = StateBatch(
            np.array([5, 3], dtype=np.int32),
            np.array([at, at], dtype=np.int32),
            np.ones(2, dtype=np.int32),
            np.array([[1, 1, 7]] if at == 3 else [], dtype=np.int32).reshape(-1, 3),
        )
        states.begin(batch)
        copies = torch.from_numpy(np.append(copies_of_singles(batch), [-1, -1]))
        states.plan_decodes(torch.arange(4), torch.tensor([5, 3, ROWS - 1, ROWS - 1]), copies)
        parts = [one.part(at, at + 1), other.part(at, at + 1), padding]
        outs.append(torch.cat(attended(states, parts)[:2]))
    got = torch.stack(outs, 1).double()
    torch.testing.assert_close(got[0], one.formula(), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got[1], other.formula(), atol=2e-5, rtol=1e-4)
    (again,) = run(states, [(8, other, 4, 6)], [(0, 0, 7)])
    torch.testing.assert_close(again.double(), other.formula()[4:], atol=2e-5, rtol=1e-4)


@pytest.mark.interpreter
def test_the_gated_norm() -> None:
    from kernels.delta_rule import decode_kernels

    columns, weight = torch.randn(3, 7 + 4 * 5), torch.rand(5)
    x, gate = torch.randn(3, 4, 5), columns[:, 7:]
    got = decode_kernels.gated_rms_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(got, gated_rms_norm(x, gate, weight, 1e-6))
