"""How many copies of recurrent states there are by default, and the memory that is set aside for them."""

import pytest
import torch
from transformers import BambaConfig, Lfm2Config, LlamaConfig

from worker.executor.kv_cache import token_bytes
from worker.executor.state_cache import checkpoint_bytes, num_checkpoints, row_bytes
from worker.models.config import HfConfig, decoder_config
from worker.models.sharding import Shard

DTYPE = torch.bfloat16


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
    count, row = num_checkpoints(whole, DTYPE, kv_tokens, None), row_bytes(whole, DTYPE)
    if is_small is None:
        assert row == count == checkpoint_bytes(whole, whole, DTYPE) == 0
        return
    of_cache = kv_tokens * token_bytes(whole, DTYPE) // row
    assert (of_cache > kv_tokens // 64) == is_small
    assert count == (kv_tokens // 64 if is_small else of_cache)
    per_token = [checkpoint_bytes(Shard(whole, rank, 2).config, whole, DTYPE) for rank in range(2)]
    assert count * row <= kv_tokens * sum(per_token)
    assert num_checkpoints(whole, DTYPE, kv_tokens, 7) == 7
