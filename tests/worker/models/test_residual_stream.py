"""Every way to run a layer gives the hidden states of its definition: the whole batch, two halves, one token."""

import itertools
from typing import Any

import pytest
import torch

from kernels.linear.linear import Linear
from kernels.ops.activation import gelu_tanh_and_mul, relu2, silu_and_mul
from kernels.ops.norm import rms_norm
from worker.models.layer import MLP, DecoderLayer, SelfAttention
from worker.models.residual_stream import (
    EMBEDDING_BUFFER,
    Activation,
    FirstSum,
    HalfBatchStream,
    OneTokenStream,
    ResidualStream,
)
from worker.parallel.communicator import Communicator

HIDDEN, SIZE, EPS = 16, 24, 1e-5
CPU = torch.device("cpu")


class TwoEqualRanks(Communicator):
    """Sums are those of two ranks that have the same parts. Notes the turns of buffers."""

    def __init__(self) -> None:
        super().__init__(None, None, 0, 2, CPU)
        self.turns: list[int] = []

    def reduce_buffer(self, rows: int, columns: int, dtype: torch.dtype, turn: int) -> torch.Tensor | None:
        self.turns.append(turn)
        return torch.empty(rows, columns, dtype=dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


def random(*shape: int) -> torch.Tensor:
    return 0.25 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def layer(
    activation: Activation, out_norm: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> DecoderLayer:
    config: Any = None  # only attention itself reads it
    qkv, out = Linear(random(3 * HIDDEN, HIDDEN)), Linear(random(HIDDEN, HIDDEN), bias)
    first, down = Linear(random((1 if activation is relu2 else 2) * SIZE, HIDDEN)), Linear(random(HIDDEN, SIZE))
    return DecoderLayer(
        SelfAttention(config, 0, 0, random(HIDDEN), qkv, out, out_norm=out_norm),
        MLP(random(HIDDEN), first, down, activation, out_norm),
    )


def written_out(own: DecoderLayer, x: torch.Tensor, attended: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    """The definition: every product, norm and sum by itself. Returns the hidden states, and the input of attention."""

    def normalised(out: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return ranks * out if norm is None else rms_norm(ranks * out, norm, EPS)

    attention, mlp = own.attention, own.mlp
    x = x + normalised(attention.out(attended), attention.out_norm)
    activated = mlp.activation(mlp.gate_up(rms_norm(x, mlp.norm, EPS)))
    x = x + normalised(mlp.down(activated), mlp.out_norm)
    return x, attention.qkv(rms_norm(x, attention.input_norm, EPS))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("has_out_norm", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_whole_batch(ranks: int, has_out_norm: bool, has_bias: bool) -> None:
    own = layer(silu_and_mul, random(HIDDEN) if has_out_norm else None, random(HIDDEN) if has_bias else None)
    x, attended = random(5, HIDDEN), random(5, HIDDEN)
    expected = written_out(own, x, attended, ranks)
    group = Communicator.single() if ranks == 1 else TwoEqualRanks()
    stream = ResidualStream(x.clone(), group, EPS)
    own.post_attention(stream, attended)
    torch.testing.assert_close(stream.complete(), expected[0])
    stream = ResidualStream(x.clone(), group, EPS)
    own.post_attention(stream, attended)
    torch.testing.assert_close(own.attention.project(stream), expected[1])
    torch.testing.assert_close(stream.complete(), expected[0])
    if isinstance(group, TwoEqualRanks):
        assert group.turns == [0, 1, 0, 1]


@pytest.mark.parametrize("follows_embedding", [True, False])
@pytest.mark.parametrize("sums", [1, 2, 3, 6, 7])
def test_consecutive_sums_have_different_turns(sums: int, follows_embedding: bool) -> None:
    """In a step and from one step to the next, also where layers have one sublayer."""
    group, linear = TwoEqualRanks(), Linear(random(HIDDEN, HIDDEN))
    for _ in range(3):
        if follows_embedding:
            group.turns.append(EMBEDDING_BUFFER)
        stream = ResidualStream(random(2, HIDDEN), group, EPS, first_sum=FirstSum.of(sums, follows_embedding))
        for _ in range(sums):
            stream.add(linear, random(2, HIDDEN))
            stream.complete()
    assert all(turn != following for turn, following in itertools.pairwise(group.turns))
    apart = 3 if sums % 2 and not follows_embedding else 0
    assert len(group.turns) == 3 * (sums + follows_embedding) - apart


def test_two_halves() -> None:
    own = layer(silu_and_mul)
    x, attended = random(5, HIDDEN), random(5, HIDDEN)
    expected = written_out(own, x, attended, 2)
    qkv = torch.empty(5, 3 * HIDDEN)
    for half in (slice(0, 2), slice(2, 5)):
        stream = HalfBatchStream(x[half], TwoEqualRanks(), EPS)
        own.attention.add_output(stream, attended[half])
        own.mlp.forward(stream)
        own.attention.project(stream, qkv[half])
        stream.complete()
    torch.testing.assert_close(x, expected[0])
    torch.testing.assert_close(qkv, expected[1])


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul, relu2])
def test_one_token(activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("kernels.linear.linear._has_blocked_layout", lambda dtype: False)
    own = layer(activation)
    x, attended = random(1, HIDDEN), random(1, HIDDEN)
    expected = written_out(own, x, attended, 1)
    stream = OneTokenStream(x, Communicator.single(), EPS)
    own.post_attention(stream, attended)
    torch.testing.assert_close(own.attention.project(stream), expected[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(stream.complete(), expected[0], atol=1e-5, rtol=1e-4)


@pytest.mark.interpreter
@pytest.mark.parametrize("rank", [0, 1])
def test_one_token_is_added_to_by_the_first_rank_only(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("kernels.linear.linear._has_blocked_layout", lambda dtype: False)
    group = TwoEqualRanks()
    group.rank = rank
    linear, x, y = Linear(random(HIDDEN, SIZE)), random(1, HIDDEN), random(1, SIZE)
    stream = OneTokenStream(x, group, EPS)
    stream.add(linear, y)
    torch.testing.assert_close(stream.complete(), 2 * (linear(y) + (x if rank == 0 else 0)))
