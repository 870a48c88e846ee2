"""The names of tensors in checkpoints, and those that a rank does not need."""

import re

from worker.models.config import DecoderConfig
from worker.models.family import Family
from worker.models.sharding import Shard


def full_name(name: str, family: Family) -> str:
    """The name of a tensor in a model with a head, as `worker.checkpoint.destinations` has it. In a checkpoint of the
    layers alone, as embedding models have, names begin without `model.`."""
    name = family.renamed(name)
    return f"model.{name}" if name.startswith(("embed_tokens.", "embed_positions.", "layers.", "norm.")) else name


def is_ignored(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor is not needed: what the family ignores; rotary frequencies, in old checkpoints; a second copy of
    tied embeddings; keys and values of layers that read others'."""
    of_kv = re.match(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.", name)
    if of_kv is not None and config.own_sizes is not None and int(of_kv[1]) < config.num_layers:
        return config.own_sizes[int(of_kv[1])].kv_before > 0
    if config.family.ignores(name) or name.endswith(".rotary_emb.inv_freq"):
        return True
    return config.tied_embeddings and name == "lm_head.weight"


def is_elsewhere(name: str, shard: Shard) -> bool:
    """Whether the tensor belongs to another stage, or is an expert that another rank has."""
    expert, experts = re.search(r"\.mlp\.experts\.(\d+)\.", name), shard.config.experts
    if expert is not None and experts is not None:
        number = int(expert[1])
        if number < experts.count and number not in experts.own:
            return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None:
        index = int(layer[1])
        return index < shard.whole.num_layers + shard.whole.extra_layers and index not in shard.layers
    if name == "model.embed_tokens.weight":
        return not shard.config.has_embedding
    if name.startswith(("model.embed_positions.", "model.embed_tokens_per_layer.", "model.per_layer_")):
        return not shard.config.is_first
    return name.startswith(("model.norm.", "lm_head.")) and not shard.config.is_last
