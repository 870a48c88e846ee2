"""How a model is cut: every head, column and row is on one rank, and a query head beside the KV head that it reads."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ops.rotary import Rope
from kernels.recurrent.shape import StateShape
from worker.models.config import DecoderConfig
from worker.models.families import FAMILIES
from worker.models.mamba2 import Mamba2Config
from worker.models.sharding import Shard


def make(num_heads: int, num_kv_heads: int, intermediate_size: int = 96, vocab_size: int = 260) -> DecoderConfig:
    return DecoderConfig(
        model_type="llama",
        family=FAMILIES["llama"],
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        norm_eps=1e-5,
        activation="silu",
        context_length=128,
        tied_embeddings=False,
        windows=(None,),
        ropes=(Rope(8, 1e4, "default", {}),),
        attention_scale=1.0,
    )


@st.composite
def cut(draw: st.DrawFn) -> list[Shard]:
    group, kv_heads = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    size = draw(st.integers(2, min(9, group * kv_heads)) if group * kv_heads > 1 else st.just(1))
    config = make(group * kv_heads, kv_heads, draw(st.integers(1, 300)), draw(st.integers(1, 700)))
    return [Shard(config, rank, size) for rank in range(size)]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(2, 9))
def test_heads_of_mamba2_are_somewhere_once(groups: int, heads_of_group: int, size: int) -> None:
    """Next to the keys of their group, which several ranks may hold."""
    size = min(size, groups * heads_of_group)
    states = StateShape(groups, groups * heads_of_group, 4, 4, 4)
    net = Mamba2Config(states, (True,), 1e-5, has_bias=True, group_size=4 * heads_of_group)
    whole = replace(make(16, 16), recurrent=net)
    shards = [Shard(whole, rank, size) for rank in range(size)]
    assert [head for shard in shards for head in shard.value_heads] == list(range(states.value_heads))
    for shard in shards:
        own = shard.config.recurrent
        assert isinstance(own, Mamba2Config)
        assert len(shard.key_heads) <= own.states.key_heads and len(shard.value_heads) <= own.states.value_heads
        assert {head // heads_of_group for head in shard.value_heads} <= set(shard.key_heads)
        if own.shared_group is not None and len(shard.value_heads):
            assert list(shard.key_heads) == [own.shared_group[0]]
        if own.shared_group is None:  # the kernels find a head's group so
            own_group = own.states.value_heads // own.states.key_heads
            places = [(head - shard.value_heads.start) // own_group for head in shard.value_heads]
            assert places == [head // heads_of_group - shard.key_heads.start for head in shard.value_heads]


@settings(deadline=None, max_examples=300)
@given(cut())
def test_everything_is_somewhere_once(shards: list[Shard]) -> None:
    whole, own = shards[0].whole, shards[0].config
    assert all(shard.config == own for shard in shards)
    assert own.num_heads % own.num_kv_heads == 0
    for name, total, size in (
        ("heads", whole.num_heads, own.num_heads),
        ("intermediate", whole.intermediate_size, own.intermediate_size),
        ("vocabulary", whole.vocab_size, own.vocab_rows),
    ):
        parts = [getattr(shard, name) for shard in shards]
        assert [i for part in parts for i in part] == list(range(total)), name
        assert all(len(part) <= size for part in parts), name
    # The head's rows lie where the gathered logits have them.
    assert all(shard.vocabulary.start in (shard.rank * own.vocab_rows, whole.vocab_size) for shard in shards)
    assert len(shards) == 1 or own.vocab_rows % 8 == 0


@settings(deadline=None, max_examples=300)
@given(cut())
def test_a_query_head_finds_its_kv_head(shards: list[Shard]) -> None:
    whole, own = shards[0].whole, shards[0].config
    for shard in shards:
        assert len(shard.kv_heads) <= own.num_kv_heads
        for place, head in enumerate(shard.heads):
            local = place // (own.num_heads // own.num_kv_heads)
            assert shard.kv_heads[local] == head // (whole.num_heads // whole.num_kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "own"),
    [
        (32, 8, 4, (8, 2)),
        (64, 8, 8, (8, 1)),
        (16, 8, 16, (1, 1)),
        (9, 3, 2, (6, 2)),
        (9, 3, 4, (3, 1)),
        (3, 1, 2, (2, 1)),
    ],
)
def test_heads_of_a_rank(heads: int, kv_heads: int, size: int, own: tuple[int, int]) -> None:
    config = Shard(make(heads, kv_heads), 0, size).config
    assert (config.num_heads, config.num_kv_heads) == own


def test_what_divides_is_cut_evenly() -> None:
    shards = [Shard(make(32, 8, 96, 320), rank, 4) for rank in range(4)]
    assert {len(shard.intermediate) for shard in shards} == {24} and {len(shard.vocabulary) for shard in shards} == {80}
    assert all(before.stop == after.start for before, after in pairwise(shard.heads for shard in shards))


def test_one_rank_has_the_model_as_it_is() -> None:
    config = make(9, 3, 97, 261)
    assert Shard(config).config is config and config.vocab_rows == 261


def test_more_ranks_than_heads() -> None:
    with pytest.raises(ValueError, match=r"tp=4 .*\b3 attention heads"):
        Shard(make(3, 1), 0, 4)
