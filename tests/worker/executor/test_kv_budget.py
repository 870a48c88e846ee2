"""How a rank's memory is divided between the groups of a model's cache, by default and as configured."""

import pytest
import torch
from transformers import BambaConfig, Lfm2Config, Lfm3Config, LlamaConfig

from worker.config import WorkerConfig
from worker.executor.memory_budget import KVBudget, row_bytes, token_bytes
from worker.kv_layout import KVGroup, KVLayout
from worker.models.config import DecoderConfig, HfConfig, decoder_config
from worker.models.sharding import Shard

DTYPE = torch.bfloat16


def budget(whole: DecoderConfig, own: DecoderConfig | None = None, **config: object) -> KVBudget:
    settings = WorkerConfig.model_validate({"page_size": 16, "token_budget": 512, **config})
    return KVBudget(whole, whole if own is None else own, DTYPE, settings, whole.context_length)


def rows(layout: KVLayout) -> int:
    return sum(group.num_units for group in layout.of_kind("states"))


@pytest.mark.parametrize(
    ("config", "is_small"),
    [
        (BambaConfig(attn_layer_indices=[9, 18, 27]), False),
        (Lfm2Config(full_attn_idxs=[2, 5]), True),
        (LlamaConfig(), None),
    ],
)
def test_checkpoints_take_the_memory_of_the_cache_or_less(config: HfConfig, is_small: bool | None) -> None:
    """Less, where a row of the states is so small that there would be more than one for 64 tokens."""
    whole, kv_tokens = decoder_config(config), 640_000
    count, row = rows(budget(whole).layout(kv_tokens)), row_bytes(whole, DTYPE)
    if is_small is None:
        assert row == count == 0 and budget(whole).bytes_per_token == token_bytes(whole, DTYPE)
        return
    of_cache = kv_tokens * token_bytes(whole, DTYPE) // row
    assert (of_cache > kv_tokens // 64) == is_small
    assert count == (kv_tokens // 64 if is_small else of_cache)
    ranks = [Shard(whole, rank, 2).config for rank in range(2)]
    per_token = [budget(whole, own).bytes_per_token - token_bytes(own, DTYPE) for own in ranks]
    assert count * row <= kv_tokens * sum(per_token)
    assert rows(budget(whole, state_checkpoints=7).layout(kv_tokens)) == 7


LAYERS = ["conv", "conv", "sliding_attention", "conv", "full_attention", "sliding_attention"]


def test_a_model_with_states_and_windows_has_groups_for_both() -> None:
    hf = Lfm3Config(layer_types=LAYERS, num_hidden_layers=len(LAYERS), sliding_window=1024)
    whole = decoder_config(hf)
    layout = budget(whole).layout(1 << 17)
    assert [(group.kind, group.layers) for group in layout.groups] == [
        ("full", (4,)), ("window", (2, 5)), ("states", (0, 1, 3)),
    ]  # fmt: skip
    full, window, states = layout.groups
    token = token_bytes(whole, DTYPE) // 3
    assert (full.num_units, full.unit_bytes) == (8192, 16 * token)
    assert (window.num_units, window.unit_bytes, window.window_tokens) == (2048, 2 * 16 * token, 1024)
    assert (states.num_units, states.unit_bytes) == ((1 << 17) // 64, row_bytes(whole, DTYPE))
    used = sum(group.num_units * group.unit_bytes for group in layout.groups)
    assert used <= (1 << 17) * budget(whole).bytes_per_token
    kinds = [group.kind for group in budget(whole, window_kv_tokens=0).layout(1 << 17).groups]
    assert kinds == ["full", "states"], "windows keep all tokens"


@pytest.mark.parametrize("kinds", [(), ("window", "full"), ("full", "states", "window"), ("states", "full")])
def test_groups_in_another_order_are_refused(kinds: tuple) -> None:
    with pytest.raises(ValueError, match="the first sees all tokens"):
        KVLayout(16, tuple(KVGroup(kind, (), 1, 1) for kind in kinds))
