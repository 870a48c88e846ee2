"""Which of the tiny models are run on several ranks and in stages.

Ranks and stages see a family through its configuration: which parameters it has, which part of each a rank gets, what
is summed where. SHARDED has every such element of every family (`tests/worker/test_covering.py`), so that what one
family adds is run, and what others share with it is not run again. All families: `make nightly`.
"""

import re
from dataclasses import fields
from functools import cache

from transformers import AutoConfig

from tests.conftest import NIGHTLY
from tests.worker.conftest import COMMON, TINY
from worker.checkpoint.destinations import destinations
from worker.models.config import DecoderConfig, decoder_config
from worker.models.sharding import Shard

COVERING = (
    *("llama", "llama_one_kv_head", "phi", "phi3_partial", "gpt2", "gpt_neox", "minicpm3"),
    *("qwen2_moe", "deepseek_v3_moe", "gpt_oss", "llama4_moe", "gemma4", "gemma4_moe", "hunyuan_v1_moe"),
    *("minimax_m2_moe", "flex_olmo_moe", "cohere2_moe", "laguna_moe"),
    *("qwen3_next", "falcon_h1", "granitemoehybrid", "bamba", "lfm2", "lfm2_moe", "lfm3"),
    *("nemotron_h_moe", "nemotron_h_latent_moe"),
)
SHARDED = tuple(TINY) if NIGHTLY else COVERING

# Fields of a configuration that decide what is computed between two sums over ranks, or which layers can be parted.
FLAGS = (
    *("tied_embeddings", "parallel", "sandwich_norms", "pre_norms", "layer_norms", "qk_norm", "gated_mlps"),
    *("out_bias", "mlp_bias", "q_lora_rank"),
)
PARTS = ("latent", "own_sizes", "recurrent", "experts", "output_gate", "sublayers", "layer_inputs")


@cache
def config_of(name: str) -> DecoderConfig:
    """The configuration of a tiny model."""
    model_type, changes = TINY[name]
    return decoder_config(AutoConfig.for_model(model_type, **(COMMON | changes)))


@cache
def elements(name: str) -> frozenset[tuple[object, ...]]:
    """What ranks and stages see of a tiny model."""
    config = config_of(name)
    found = {(flag, getattr(config, flag)) for flag in FLAGS}
    found |= {(part, type(getattr(config, part)).__name__) for part in PARTS}
    found |= {("heads", config.num_heads, config.num_kv_heads), *_of_experts(config), *_of_states(config)}
    return frozenset(found | _of_parameters(config))


def _of_parameters(config: DecoderConfig) -> set[tuple[object, ...]]:
    """By parameter: how many pieces of a tensor the second of two ranks has, and whether each is a part, begins behind
    the first element, is reordered, and is multiplied."""
    found: set[tuple[object, ...]] = set()
    for to in destinations(Shard(config, rank=1, size=2), stacked=False).values():
        rows = to.shape[to.dim]
        pieces = [(len(p.kept) == rows, p.kept.start > 0, p.order is None, p.factor == 1) for p in to.pieces]
        parameter = re.sub(r"\d+", "N", to.parameter)
        found.add((parameter, to.dim, len(pieces), *pieces[:3], to.expert is None))
    return found


def _of_experts(config: DecoderConfig) -> set[tuple[object, ...]]:
    if config.experts is None:
        return set()
    sizes = {"count", "intermediate_size", "routing", "own"}
    own = [field.name for field in fields(config.experts) if field.name not in sizes]
    return {("experts", name, repr(getattr(config.experts, name))) for name in own}


def _of_states(config: DecoderConfig) -> set[tuple[object, ...]]:
    recurrent = config.recurrent
    return set() if recurrent is None else {("states", recurrent.states, recurrent.alongside_attention)}
