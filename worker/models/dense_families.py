"""Rows of `worker.models.families`: dense models. Each function says how a family differs from a plain Llama."""

from dataclasses import replace
from typing import Any

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.family_rules import HfConfig, RopeRules, expert_count, refuse_other_than
from worker.models.layer_inputs import LayerInputsConfig
from worker.models.layer_sizes import LayerSizes
from worker.models.query_temperature import QueryTemperature


def llama(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "mlp_bias": hf.mlp_bias}


def arcee(hf: HfConfig) -> dict[str, Any]:
    return llama(hf) | {"gated_mlps": False}


def nemotron(hf: HfConfig) -> dict[str, Any]:
    return llama(hf) | {
        "norm_eps": hf.norm_eps,
        "layer_norms": True,
        "gemma_norms": True,
        "gated_mlps": False,
        "rope_rules": RopeRules(is_partial=True),
    }


def jais2(hf: HfConfig) -> dict[str, Any]:
    return llama(hf) | {"norm_eps": hf.layer_norm_eps, "layer_norms": True, "gated_mlps": False}


def starcoder2(hf: HfConfig) -> dict[str, Any]:
    return mistral(hf) | {
        "norm_eps": hf.norm_epsilon,
        "qkv_bias": hf.use_bias,
        "out_bias": hf.use_bias,
        "mlp_bias": hf.use_bias,
        "layer_norms": True,
        "gated_mlps": False,
    }


def mistral(hf: HfConfig) -> dict[str, Any]:
    return {"windows": (hf.sliding_window,) * hf.num_hidden_layers}


def ministral3(hf: HfConfig) -> dict[str, Any]:
    return mistral(hf) | {"query_temperature": temperature(hf)}


def temperature(hf: HfConfig) -> QueryTemperature | None:
    rope = hf.rope_parameters
    factor = rope.get("llama_4_scaling_beta")
    return QueryTemperature(rope["original_max_position_embeddings"], factor) if factor else None


def qwen2(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": True}


def qwen3(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "qk_norm": "head"}


def seed_oss(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_out_bias, "mlp_bias": hf.mlp_bias}


def cwm(hf: HfConfig) -> dict[str, Any]:
    return {"mlp_bias": hf.mlp_bias}


def gemma(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "gemma_norms": True,
        "embedding_scale": hf.hidden_size**0.5,
    }


def gemma2(hf: HfConfig) -> dict[str, Any]:
    return gemma(hf) | {
        "sandwich_norms": True,
        "attention_scale": hf.query_pre_attn_scalar**-0.5,
        "attention_softcap": hf.attn_logit_softcapping,
        "logit_softcap": hf.final_logit_softcapping,
    }


def gemma3(hf: HfConfig) -> dict[str, Any]:
    return gemma2(hf) | {"qk_norm": "head"}


def gemma4(hf: HfConfig) -> dict[str, Any]:
    """Full attention has heads of another size than windows. Small models have inputs of each layer, and their last
    layers read keys and values of earlier ones; large ones have values made of the keys' product, some have experts."""
    layers, inputs = hf.num_hidden_layers, getattr(hf, "hidden_size_per_layer_input", None) or 0
    if inputs and hf.vocab_size_per_layer_input != hf.vocab_size:
        raise ValueError("gemma4 models whose layers' inputs have a vocabulary of their own are not supported")
    experts = None
    if getattr(hf, "enable_moe_block", False):
        routing = Routing(hf.top_k_experts)
        every = (True,) * layers
        experts = ExpertsConfig(
            expert_count(hf), hf.moe_intermediate_size, routing, every, hf.intermediate_size, is_beside_mlp=True
        )
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
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


def smollm3(hf: HfConfig) -> dict[str, Any]:
    rotated = {index: bool(has_rope) for index, has_rope in enumerate(hf.no_rope_layers)}
    return llama(hf) | {"rope_rules": RopeRules(layers=rotated)}


def scaled_residuals(hf: HfConfig, embedding: float, residual: float) -> dict[str, Any]:
    """Embeddings are multiplied by one number, and sublayers' outputs by another as they are added. The decoder keeps
    the hidden states divided by the latter, which norms undo: their epsilon is divided by its square."""
    return {"norm_eps": hf.rms_norm_eps / residual**2, "embedding_scale": embedding / residual}


def granite(hf: HfConfig) -> dict[str, Any]:
    return scaled_residuals(hf, hf.embedding_multiplier, hf.residual_multiplier) | {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "mlp_bias": getattr(hf, "mlp_bias", False),
        "attention_scale": hf.attention_multiplier,
        "logit_scale": 1.0 / hf.logits_scaling,
    }


def granite_swa(hf: HfConfig) -> dict[str, Any]:
    return granite(hf) | swash_attention(hf)


def swash_attention(hf: HfConfig) -> dict[str, Any]:
    """Attention of Granite Swash. A layer with base 0 does not rotate."""
    thetas = tuple(float(theta) for theta in hf.layer_rope_theta)
    rotated = {index: theta != 0 for index, theta in enumerate(thetas)}
    return {"has_sinks": True, "rope_rules": RopeRules(layers=rotated, thetas=thetas)}


def phi(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(hf, qk_layernorm=False)
    return {
        "norm_eps": hf.layer_norm_eps,
        "layer_norms": True,
        "parallel": "one norm",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "gated_mlps": False,
        "rope_rules": RopeRules(is_partial=True),
    }


def gpt2(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return {
        "intermediate_size": hf.n_inner or 4 * hf.hidden_size,
        "norm_eps": hf.layer_norm_epsilon,
        "layer_norms": True,
        "learned_positions": hf.max_position_embeddings,
        "num_kv_heads": hf.num_attention_heads,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "gated_mlps": False,
    }


def gpt_neox(hf: HfConfig) -> dict[str, Any]:
    return {
        "norm_eps": hf.layer_norm_eps,
        "layer_norms": True,
        "parallel": "two norms" if hf.use_parallel_residual else None,
        "num_kv_heads": hf.num_attention_heads,
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "mlp_bias": True,
        "gated_mlps": False,
        "rope_rules": RopeRules(is_partial=True),
    }


def cohere(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(hf, use_qk_norm=False)
    return {
        "norm_eps": hf.layer_norm_eps,
        "layer_norms": True,
        "norm_biases": False,
        "float32_norms": True,
        "parallel": "one norm",
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "logit_scale": 1.0 if hf.logit_scale is None else hf.logit_scale,
        "rope_rules": RopeRules(is_interleaved=True),
    }


def cohere2(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(
        hf,
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        use_gated_activation=True,
        use_parallel_block=True,
        order_of_interleaved_layers="local_attn_first",
    )
    return cohere(hf) | {"rope_rules": replace(rotated_windows(hf), is_interleaved=True)}


def hyperclovax(hf: HfConfig) -> dict[str, Any]:
    """Norms after sublayers come before the multiplier, which `granite` cannot undo."""
    if hf.use_post_norm and hf.residual_multiplier != 1.0:
        raise ValueError(f"hyperclovax models with residual_multiplier {hf.residual_multiplier} are not supported")
    return granite(hf) | {"sandwich_norms": hf.use_post_norm, "logit_scale": hf.logits_scaling}


def olmo2(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "qk_norm": "all",
        "pre_norms": False,
        "sandwich_norms": True,
    }


def rotated_windows(hf: HfConfig) -> RopeRules:
    """Layers with a window rotate, and those without do not."""
    return RopeRules(layers={index: kind == "sliding_attention" for index, kind in enumerate(hf.layer_types)})


def exaone(hf: HfConfig) -> dict[str, Any]:
    """Attention of EXAONE 4. Models without windows rotate in all layers."""
    return {"qk_norm": "head", "rope_rules": RopeRules() if hf.sliding_window is None else rotated_windows(hf)}


def exaone4(hf: HfConfig) -> dict[str, Any]:
    return exaone(hf) | {"pre_norms": False, "sandwich_norms": True}


def phi3(hf: HfConfig) -> dict[str, Any]:
    return {"windows": (hf.sliding_window,) * hf.num_hidden_layers, "rope_rules": RopeRules(is_partial=True)}


def hunyuan(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(hf, use_qk_norm=True, use_cla=False)
    if (kind := hf.rope_parameters["rope_type"]) in ("yarn", "longrope"):  # norms would undo their amplitude
        raise ValueError(f"{hf.model_type} models with rope_type {kind!r} are not supported")
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "qk_norm": "after"}


def glm(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "rope_rules": RopeRules(is_partial=True, is_interleaved=True)}


def glm4(hf: HfConfig) -> dict[str, Any]:
    return glm(hf) | {"sandwich_norms": True}


def glm4v(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": True,
        "sandwich_norms": True,
        "rope_rules": RopeRules(is_partial=True, is_interleaved=True),
    }


def ernie(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": hf.use_bias,
        "out_bias": hf.use_bias,
        "mlp_bias": hf.use_bias,
        "rope_rules": RopeRules(is_interleaved=True),
    }
