"""Gemma 4."""

from kernels.experts.choice import Routing
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import experts_of
from worker.models.layer_inputs import LayerInputsConfig
from worker.models.layer_sizes import LayerSizes


def gemma4(hf: HfConfig) -> Differences:
    """Full attention has heads of another size than windows. Small models have inputs of each layer, and their last
    layers read keys and values of earlier ones; large ones have values made of the keys' product, some have experts."""
    layers, inputs = hf.num_hidden_layers, getattr(hf, "hidden_size_per_layer_input", None) or 0
    if inputs and hf.vocab_size_per_layer_input != hf.vocab_size:
        raise ValueError("gemma4 models whose layers' inputs have a vocabulary of their own are not supported")
    experts = None
    if getattr(hf, "enable_moe_block", False):
        experts = experts_of(hf, Routing(hf.top_k_experts), shared_size=hf.intermediate_size, is_beside_mlp=True)
    return {
        "qk_norm": "head",
        "value_norm": True,
        "float32_norms": True,
        "sandwich_norms": True,
        "embedding_scale": hf.hidden_size**0.5,
        "attention_scale": 1.0,
        "logit_softcap": hf.final_logit_softcapping,
        "own_sizes": _gemma4_sizes(hf),
        "layer_inputs": LayerInputsConfig(inputs, layers) if inputs else None,
        "layer_scales": True,
        "experts": experts,
    }


def _gemma4_sizes(hf: HfConfig) -> tuple[LayerSizes, ...]:
    kinds, first_shared = hf.layer_types, hf.num_hidden_layers - hf.num_kv_shared_layers
    own = {int(index): said for index, said in hf.per_layer_config.items()}
    if other := {name for said in own.values() for name in said} - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"gemma4 models whose layers differ in {sorted(other)} are not supported")
    sizes = []
    for index, kind in enumerate(kinds):
        said, shares = own.get(index, {}), index >= first_shared
        source = first_shared - 1 - kinds[:first_shared][::-1].index(kind) if shares else index
        sizes.append(
            LayerSizes(
                hf.num_attention_heads,
                said.get("num_key_value_heads", hf.num_key_value_heads),
                said.get("head_dim", hf.head_dim),
                hf.intermediate_size * (2 if hf.use_double_wide_mlp and shares else 1),
                kv_before=index - source,
                keys_are_values=hf.attention_k_eq_v and kind == "full_attention",
            )
        )
    heads = {(kind, each.num_kv_heads, each.head_dim) for kind, each in zip(kinds, sizes, strict=True)}
    if len(heads) > len(set(kinds)):
        raise ValueError("gemma4 models whose layers of one kind have heads of several sizes are not supported")
    return tuple(sizes)


_GEMMA4 = Family(
    gemma4,
    names={"experts": "mlp.experts", "router": "mlp.gate", "router.proj": "mlp.gate"},
    text_of=("gemma4", "gemma4_unified"),
    ignored=("vision_tower", "vision_embedder", "embed_vision", "audio_tower", "embed_audio"),
)
FAMILIES = {"gemma4_text": _GEMMA4, "gemma4_unified_text": _GEMMA4}
