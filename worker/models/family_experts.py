"""Rows of `worker.models.families`: mixtures of experts with attention over keys and values."""

from dataclasses import replace
from typing import Any

from kernels.experts.choice import Routing
from kernels.experts.mxfp4_weight import GROUP
from kernels.ops.activation import ClampedSwiGLU
from worker.models.dense_families import (
    cohere2,
    ernie,
    exaone,
    granite,
    hunyuan,
    mistral,
    olmo2,
    qwen3,
    rotated_windows,
    swash_attention,
)
from worker.models.experts import ExpertsConfig
from worker.models.family_rules import HfConfig, RopeRules, expert_count, prediction_layers, refuse_other_than
from worker.models.layer_sizes import LayerSizes
from worker.models.output_gate import OutputGate
from worker.models.query_temperature import QueryTemperature

_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")  # names of the number of shared experts


def sparse_layers(hf: HfConfig) -> tuple[bool, ...]:
    """For each layer whether it has experts."""
    return tuple(kind == "sparse" for kind in hf.mlp_layer_types)


def mixtral(hf: HfConfig) -> dict[str, Any]:
    return mistral(hf) | {
        "experts": ExpertsConfig(
            expert_count(hf),
            hf.intermediate_size,
            Routing(hf.num_experts_per_tok),
            (True,) * hf.num_hidden_layers,
        )
    }


def phimoe(hf: HfConfig) -> dict[str, Any]:
    if hf.num_experts_per_tok != 2:
        raise ValueError(f"phimoe models with {hf.num_experts_per_tok} experts a token are not supported")
    routing = Routing(2, "sparsemixer", jitter=hf.router_jitter_noise)
    every = (True,) * hf.num_hidden_layers
    return mistral(hf) | {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "layer_norms": True,
        "head_bias": hf.lm_head_bias,
        "experts": ExpertsConfig(expert_count(hf), hf.intermediate_size, routing, every),
    }


def qwen3_moe(hf: HfConfig) -> dict[str, Any]:
    return qwen3(hf) | {"windows": (hf.sliding_window,) * hf.num_hidden_layers, "experts": qwen_experts(hf)}


def mellum(hf: HfConfig) -> dict[str, Any]:
    routing = Routing(hf.num_experts_per_tok, is_normalised=hf.norm_topk_prob)
    experts = ExpertsConfig(expert_count(hf), hf.moe_intermediate_size, routing, sparse_layers(hf))
    return qwen3(hf) | {"rope_rules": RopeRules(is_partial=True), "experts": experts}


def qwen3_vl_moe(hf: HfConfig) -> dict[str, Any]:
    return qwen3(hf) | {"experts": qwen_experts(hf, is_normalised=True)}


def qwen2_moe(hf: HfConfig) -> dict[str, Any]:
    experts = qwen_experts(hf, shared_size=hf.shared_expert_intermediate_size, has_shared_gate=True)
    return {"qkv_bias": hf.qkv_bias, "experts": experts}


def qwen_experts(hf: HfConfig, is_normalised: bool | None = None, **shared: Any) -> ExpertsConfig:
    """`is_normalised`: whether weights are, where the configuration does not say."""
    layers = tuple(
        index not in hf.mlp_only_layers and (index + 1) % hf.decoder_sparse_step == 0
        for index in range(hf.num_hidden_layers)
    )
    if is_normalised is None:
        is_normalised = hf.norm_topk_prob
    routing = Routing(hf.num_experts_per_tok, is_normalised=is_normalised)
    return ExpertsConfig(expert_count(hf), hf.moe_intermediate_size, routing, layers, **shared)


def cohere2_moe(hf: HfConfig) -> dict[str, Any]:
    """Layers with an MLP may rotate without a window too."""
    kinds = {"sigmoid": hf.norm_topk_prob, "softmax": True}
    if (kind := hf.expert_selection_fn) not in kinds:
        raise ValueError(f"cohere2_moe models with expert_selection_fn {kind!r} are not supported")
    if (joined := hf.shared_expert_combination_strategy) not in ("sum", "average"):
        raise ValueError(f"cohere2_moe models with shared_expert_combination_strategy {joined!r} are not supported")
    is_mean = hf.num_shared_experts > 0 and joined == "average"
    routing = Routing(hf.num_experts_per_tok, kind, kinds[kind], scale=0.5 if is_mean else 1.0)
    layers, size = sparse_layers(hf), hf.intermediate_size
    experts = ExpertsConfig(expert_count(hf), size, routing, layers, size * hf.num_shared_experts)
    own, mlps_rotate = cohere2(hf), hf.prefix_dense_sliding_window_pattern == 1
    rotated = {
        index: is_rotated or (mlps_rotate and not layers[index])
        for index, is_rotated in own["rope_rules"].layers.items()
    }
    if hf.rms_norm_eps is not None:
        own |= {"norm_eps": hf.rms_norm_eps, "layer_norms": False, "float32_norms": False}
    return own | {
        "rope_rules": RopeRules(is_interleaved=True, layers=rotated),
        "intermediate_size": hf.prefix_dense_intermediate_size or size,
        "experts": experts,
        "weight_factors": {"mlp.shared_experts.down_proj.weight": (0.5,)} if is_mean else {},
    }


def hunyuan_moe(hf: HfConfig) -> dict[str, Any]:
    """Shared experts are as large as one. Layers could differ by their fields, and do not in what is published."""
    size, layers = hf.intermediate_size, hf.num_hidden_layers
    for name, computed in (("num_shared_expert", 1), ("moe_intermediate_size", size)):
        if _of_all_layers(hf, name) not in (None, computed):
            raise ValueError(f"{hf.model_type} models with {name} {getattr(hf, name)} are not supported")
    routing = Routing(_of_all_layers(hf, "moe_topk"))
    experts = ExpertsConfig(_of_all_layers(hf, "num_experts"), size, routing, (True,) * layers, shared_size=size)
    return hunyuan(hf) | {"experts": experts}


def _of_all_layers(hf: HfConfig, name: str) -> Any:
    """A field that may have a value for each layer; None if it is missing. Raises ValueError if layers differ."""
    said = getattr(hf, name, None)
    if isinstance(said, list):
        if len(set(said)) > 1:
            raise ValueError(f"{hf.model_type} models whose layers differ in {name} are not supported")
        return said[0]
    return said


def olmoe(hf: HfConfig) -> dict[str, Any]:
    if getattr(hf, "clip_qkv", None) is not None:
        raise ValueError(f"{hf.model_type} models with clip_qkv are not supported")
    routing = Routing(hf.num_experts_per_tok, is_normalised=hf.norm_topk_prob)
    layers = (True,) * hf.num_hidden_layers
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "qk_norm": "all",
        "experts": ExpertsConfig(expert_count(hf), hf.intermediate_size, routing, layers),
    }


def flex_olmo(hf: HfConfig) -> dict[str, Any]:
    return olmo2(hf) | {"experts": olmoe(hf)["experts"]}


def granite_moe(hf: HfConfig) -> dict[str, Any]:
    experts = ExpertsConfig(
        expert_count(hf),
        hf.intermediate_size,
        Routing(hf.num_experts_per_tok),
        (True,) * hf.num_hidden_layers,
        shared_size=getattr(hf, "shared_intermediate_size", 0),
    )
    return granite(hf) | {"experts": experts}


def granite_moe_swa(hf: HfConfig) -> dict[str, Any]:
    return granite_moe(hf) | swash_attention(hf)


def sigmoid_experts(hf: HfConfig, layers: tuple[bool, ...] | None = None) -> ExpertsConfig:
    """Experts as DeepSeek-V3 has them. `layers` says which layers have them, where the configuration does not say how
    many at the begin have not."""
    if getattr(hf, "scoring_func", None) == "softmax":
        raise ValueError(f"{hf.model_type} models with scoring_func 'softmax' are not supported")
    routing = Routing(
        hf.num_experts_per_tok,
        "sigmoid",
        hf.norm_topk_prob,
        hf.routed_scaling_factor,
        hf.n_group,
        hf.topk_group,
        added_to_sum=1e-20,
    )
    if layers is None:
        layers = tuple(index >= hf.first_k_dense_replace for index in range(hf.num_hidden_layers))
    shared = next((value for name in _SHARED_EXPERTS if (value := getattr(hf, name, None))), 0)
    shared_size = hf.moe_intermediate_size * shared
    return ExpertsConfig(expert_count(hf), hf.moe_intermediate_size, routing, layers, shared_size, has_bias=True)


def _ungrouped_sigmoid_experts(
    hf: HfConfig, size: int, layers: tuple[bool, ...], scale: float = 1.0, shared: int = 0
) -> ExpertsConfig:
    """The same without groups, with `shared` experts that all tokens use. `size`: of an expert."""
    routing = Routing(hf.num_experts_per_tok, "sigmoid", scale=scale, added_to_sum=1e-20)
    return ExpertsConfig(expert_count(hf), size, routing, layers, size * shared, has_bias=True)


def glm4_moe(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": hf.attention_bias,
        "qk_norm": "head" if getattr(hf, "use_qk_norm", False) else None,
        "rope_rules": RopeRules(is_partial=True),
        "experts": sigmoid_experts(hf),
        "extra_layers": prediction_layers(hf),
    }


def dots1(hf: HfConfig) -> dict[str, Any]:
    return qwen3(hf) | {"experts": sigmoid_experts(hf)}


def solar_open(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(hf, use_qk_norm=False, first_k_dense_replace=0)
    return {
        "intermediate_size": hf.moe_intermediate_size,  # the layers have no other MLP
        "qkv_bias": hf.attention_bias,
        "rope_rules": RopeRules(is_partial=True),
        "experts": sigmoid_experts(hf, (True,) * hf.num_hidden_layers),
    }


def exaone_moe(hf: HfConfig) -> dict[str, Any]:
    return exaone(hf) | {"experts": sigmoid_experts(hf, sparse_layers(hf))}


def minimax_m2(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(
        hf, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", shared_intermediate_size=0
    )
    if not all(getattr(hf, "attn_type_list", None) or [True]):
        raise ValueError("minimax_m2 models with linear attention are not supported")
    return {
        "qk_norm": "all",
        "rope_rules": RopeRules(is_partial=True),
        "experts": _ungrouped_sigmoid_experts(hf, hf.intermediate_size, (True,) * hf.num_hidden_layers),
    }


def afmoe(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(
        hf, score_func="sigmoid", route_norm=True, n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1
    )
    if hf.attention_bias:
        raise ValueError("afmoe models with attention_bias are not supported")
    layers = tuple(index >= hf.num_dense_layers for index in range(hf.num_hidden_layers))
    return {
        "qk_norm": "head",
        "output_gate": OutputGate(),
        "float32_norms": True,
        "sandwich_norms": True,
        "embedding_scale": hf.hidden_size**0.5 if hf.mup_enabled else 1.0,
        "rope_rules": rotated_windows(hf),
        "experts": _ungrouped_sigmoid_experts(
            hf, hf.moe_intermediate_size, layers, hf.route_scale, hf.num_shared_experts or 0
        ),
    }


def laguna(hf: HfConfig) -> dict[str, Any]:
    """Layers with a window may have another number of heads than the others."""
    refuse_other_than(hf, attention_bias=False, moe_router_logit_softcapping=0.0)
    if (gating := hf.gating) not in (True, "per-head", "per-element"):
        raise ValueError(f"laguna models with gating {gating!r} are not supported")
    heads = hf.num_attention_heads_per_layer
    if len(set(zip(hf.layer_types, heads, strict=True))) > len(set(hf.layer_types)):
        raise ValueError("laguna models whose layers of one kind have several numbers of heads are not supported")
    own = [LayerSizes(count, hf.num_key_value_heads, hf.head_dim, hf.intermediate_size) for count in heads]
    experts = _ungrouped_sigmoid_experts(hf, hf.moe_intermediate_size, sparse_layers(hf), hf.moe_routed_scaling_factor)
    return {
        "qk_norm": "head",
        "output_gate": OutputGate(gating != "per-element", "softplus"),
        "own_sizes": tuple(own) if len(set(heads)) > 1 else None,
        "num_heads": min(heads),
        "rope_rules": RopeRules(is_partial=True),
        "experts": replace(experts, shared_size=hf.shared_expert_intermediate_size),
    }


def hy_v3(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(hf, qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, n_group=1)
    experts = _ungrouped_sigmoid_experts(
        hf, hf.moe_intermediate_size, sparse_layers(hf), hf.router_scaling_factor, hf.num_shared_experts or 0
    )
    return qwen3(hf) | {"mlp_bias": hf.mlp_bias, "experts": experts, "extra_layers": prediction_layers(hf)}


def ernie_moe(hf: HfConfig) -> dict[str, Any]:
    if hf.use_bias:
        raise ValueError("ernie4_5_moe models with biases are not supported")
    layers = tuple(
        (index + 1) % hf.moe_layer_interval == 0 and hf.moe_layer_start_index <= index <= hf.moe_layer_end_index
        for index in range(hf.num_hidden_layers)
    )
    experts = ExpertsConfig(
        expert_count(hf),
        hf.moe_intermediate_size,
        Routing(hf.moe_k, added_to_sum=hf.moe_norm_min),
        layers,
        hf.moe_intermediate_size * hf.moe_num_shared_experts,
        has_bias=True,
    )
    return ernie(hf) | {"experts": experts}


def gpt_oss(hf: HfConfig) -> dict[str, Any]:
    experts = ExpertsConfig(
        expert_count(hf),
        hf.intermediate_size,
        Routing(hf.num_experts_per_tok),
        (True,) * hf.num_hidden_layers,
        has_product_biases=True,
        # Published configurations, and older versions of transformers, lack alpha.
        activation=ClampedSwiGLU(hf.swiglu_limit, getattr(hf, "swiglu_alpha", 1.702)),
        unit=GROUP,
        in_mxfp4=(getattr(hf, "quantization_config", None) or {}).get("quant_method") == "mxfp4",
    )
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "has_sinks": True, "experts": experts}


def llama4(hf: HfConfig) -> dict[str, Any]:
    """A token's one expert computes the hidden state times the score."""
    if hf.num_experts_per_tok != 1:
        raise ValueError(f"llama4 models with {hf.num_experts_per_tok} experts a token are not supported")
    layers = range(hf.num_hidden_layers)
    temperature = QueryTemperature(hf.floor_scale, hf.attn_scale, first=1, in_rotated=False)
    experts = ExpertsConfig(
        expert_count(hf),
        hf.intermediate_size,
        Routing(1, "sigmoid", is_normalised=False),
        tuple(index in hf.moe_layers for index in layers),
        shared_size=hf.intermediate_size,
        scales_inputs=True,
    )
    return {
        "intermediate_size": hf.intermediate_size_mlp,
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "qk_norm": "rotated" if hf.use_qk_norm else None,
        "query_temperature": temperature if hf.attn_temperature_tuning else None,
        "rope_rules": RopeRules(
            is_interleaved=True, layers={index: bool(hf.no_rope_layers[index]) for index in layers}
        ),
        "experts": experts if any(experts.layers) else None,
    }
