"""The supported architectures: how each maps its configuration onto the decoder. `ARCHITECTURES` is the table.

A row says how a family differs from a plain Llama without biases, in fields of `DecoderConfig`. docs/MODELS.md says how
to add one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kernels.attention.interface import LatentHeads
from kernels.experts.choice import Routing
from kernels.ops.activation import ClampedSwiGLU
from kernels.ops.rotary import yarn_temperature
from kernels.recurrent.shape import StateShape
from worker.models.experts import ExpertsConfig
from worker.models.gated_delta_net import DeltaNetConfig
from worker.models.layer_inputs import LayerInputsConfig
from worker.models.layer_sizes import LayerSizes
from worker.models.mamba2 import Mamba2Config
from worker.models.query_temperature import QueryTemperature
from worker.models.short_convolution import ShortConvolutionConfig

HfConfig = Any
"""A Hugging Face configuration: a `transformers.PretrainedConfig`, or its values as `read_config` keeps them."""


@dataclass(frozen=True)
class RopeRules:
    """How a family rotates queries and keys, besides what its configuration says.

    | field | meaning |
    | --- | --- |
    | `is_partial` | only the first dimensions of a head may be rotated |
    | `is_interleaved` | neighbouring dimensions are a pair, in place of dimension i and `i + head_dim / 2` |
    | `layers` | whether the layer of a number is rotated; by default it is |
    | `head_dim` | elements of the part of a head that counts as a head here; None: of the whole head |
    """

    is_partial: bool = False
    is_interleaved: bool = False
    layers: Mapping[int, bool] = field(default_factory=dict)
    head_dim: int | None = None


def _llama(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "mlp_bias": hf.mlp_bias}


def _arcee(hf: HfConfig) -> dict[str, Any]:
    return _llama(hf) | {"gated_mlps": False}


def _nemotron(hf: HfConfig) -> dict[str, Any]:
    return _llama(hf) | {
        "norm_eps": hf.norm_eps,
        "layer_norms": True,
        "gemma_norms": True,
        "gated_mlps": False,
        "rope_rules": RopeRules(is_partial=True),
    }


def _starcoder2(hf: HfConfig) -> dict[str, Any]:
    return _mistral(hf) | {
        "norm_eps": hf.norm_epsilon,
        "qkv_bias": hf.use_bias,
        "out_bias": hf.use_bias,
        "mlp_bias": hf.use_bias,
        "layer_norms": True,
        "gated_mlps": False,
    }


def _mistral(hf: HfConfig) -> dict[str, Any]:
    return {"windows": (hf.sliding_window,) * hf.num_hidden_layers}


def _ministral3(hf: HfConfig) -> dict[str, Any]:
    return _mistral(hf) | {"query_temperature": _temperature(hf)}


def _temperature(hf: HfConfig) -> QueryTemperature | None:
    rope = hf.rope_parameters
    factor = rope.get("llama_4_scaling_beta")
    return QueryTemperature(rope["original_max_position_embeddings"], factor) if factor else None


def _qwen2(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "qk_norm": "head"}


def _seed_oss(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_out_bias, "mlp_bias": hf.mlp_bias}


def _cwm(hf: HfConfig) -> dict[str, Any]:
    return {"mlp_bias": hf.mlp_bias}


def _gemma(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "gemma_norms": True,
        "embedding_scale": hf.hidden_size**0.5,
    }


def _gemma2(hf: HfConfig) -> dict[str, Any]:
    return _gemma(hf) | {
        "sandwich_norms": True,
        "attention_scale": hf.query_pre_attn_scalar**-0.5,
        "attention_softcap": hf.attn_logit_softcapping,
        "logit_softcap": hf.final_logit_softcapping,
    }


def _gemma3(hf: HfConfig) -> dict[str, Any]:
    return _gemma2(hf) | {"qk_norm": "head"}


def _gemma4(hf: HfConfig) -> dict[str, Any]:
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
            _expert_count(hf), hf.moe_intermediate_size, routing, every, hf.intermediate_size, is_beside_mlp=True
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


def _smollm3(hf: HfConfig) -> dict[str, Any]:
    rotated = {index: bool(has_rope) for index, has_rope in enumerate(hf.no_rope_layers)}
    return _llama(hf) | {"rope_rules": RopeRules(layers=rotated)}


def _granite(hf: HfConfig) -> dict[str, Any]:
    """Sublayers' outputs are multiplied by `residual_multiplier` as they are added. The decoder keeps the hidden states
    divided by it, which norms undo: their epsilon is divided by its square."""
    multiplier = hf.residual_multiplier
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "mlp_bias": getattr(hf, "mlp_bias", False),
        "norm_eps": hf.rms_norm_eps / multiplier**2,
        "embedding_scale": hf.embedding_multiplier / multiplier,
        "attention_scale": hf.attention_multiplier,
        "logit_scale": 1.0 / hf.logits_scaling,
    }


def _hyperclovax(hf: HfConfig) -> dict[str, Any]:
    """Norms after sublayers come before the multiplier, which `_granite` cannot undo."""
    if hf.use_post_norm and hf.residual_multiplier != 1.0:
        raise ValueError(f"hyperclovax models with residual_multiplier {hf.residual_multiplier} are not supported")
    return _granite(hf) | {"sandwich_norms": hf.use_post_norm, "logit_scale": hf.logits_scaling}


def _olmo2(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "qk_norm": "all",
        "pre_norms": False,
        "sandwich_norms": True,
    }


def _rotated_windows(hf: HfConfig) -> RopeRules:
    """Layers with a window rotate, and those without do not."""
    return RopeRules(layers={index: kind == "sliding_attention" for index, kind in enumerate(hf.layer_types)})


def _exaone(hf: HfConfig) -> dict[str, Any]:
    """Attention of EXAONE 4. Models without windows rotate in all layers."""
    return {"qk_norm": "head", "rope_rules": RopeRules() if hf.sliding_window is None else _rotated_windows(hf)}


def _exaone4(hf: HfConfig) -> dict[str, Any]:
    return _exaone(hf) | {"pre_norms": False, "sandwich_norms": True}


def _phi3(hf: HfConfig) -> dict[str, Any]:
    return {"windows": (hf.sliding_window,) * hf.num_hidden_layers, "rope_rules": RopeRules(is_partial=True)}


def _hunyuan(hf: HfConfig) -> dict[str, Any]:
    _refuse_other_than(hf, use_qk_norm=True, use_cla=False)
    if (kind := hf.rope_parameters["rope_type"]) in ("yarn", "longrope"):  # norms would undo their amplitude
        raise ValueError(f"{hf.model_type} models with rope_type {kind!r} are not supported")
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "qk_norm": "after"}


def _glm(hf: HfConfig) -> dict[str, Any]:
    return {"qkv_bias": hf.attention_bias, "rope_rules": RopeRules(is_partial=True, is_interleaved=True)}


def _glm4(hf: HfConfig) -> dict[str, Any]:
    return _glm(hf) | {"sandwich_norms": True}


def _glm4v(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": True,
        "sandwich_norms": True,
        "rope_rules": RopeRules(is_partial=True, is_interleaved=True),
    }


def _ernie(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": hf.use_bias,
        "out_bias": hf.use_bias,
        "mlp_bias": hf.use_bias,
        "rope_rules": RopeRules(is_interleaved=True),
    }


_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")  # names of the number of shared experts


def _expert_count(hf: HfConfig) -> int:
    """Number of experts of a layer. Raises ValueError if the configuration has none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = next((value for name in names if (value := getattr(hf, name, None))), None)
    if count is None:
        raise ValueError(f"the configuration of the {hf.model_type} model says no number of experts")
    return int(count)


def _sparse_layers(hf: HfConfig) -> tuple[bool, ...]:
    """For each layer whether it has experts."""
    return tuple(kind == "sparse" for kind in hf.mlp_layer_types)


def _mixtral(hf: HfConfig) -> dict[str, Any]:
    return _mistral(hf) | {
        "experts": ExpertsConfig(
            _expert_count(hf),
            hf.intermediate_size,
            Routing(hf.num_experts_per_tok),
            (True,) * hf.num_hidden_layers,
        )
    }


def _phimoe(hf: HfConfig) -> dict[str, Any]:
    if hf.num_experts_per_tok != 2:
        raise ValueError(f"phimoe models with {hf.num_experts_per_tok} experts a token are not supported")
    routing = Routing(2, "sparsemixer", jitter=hf.router_jitter_noise)
    every = (True,) * hf.num_hidden_layers
    return _mistral(hf) | {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "layer_norms": True,
        "head_bias": hf.lm_head_bias,
        "experts": ExpertsConfig(_expert_count(hf), hf.intermediate_size, routing, every),
    }


def _qwen3_moe(hf: HfConfig) -> dict[str, Any]:
    return _qwen3(hf) | {"windows": (hf.sliding_window,) * hf.num_hidden_layers, "experts": _qwen_experts(hf)}


def _mellum(hf: HfConfig) -> dict[str, Any]:
    routing = Routing(hf.num_experts_per_tok, is_normalised=hf.norm_topk_prob)
    experts = ExpertsConfig(_expert_count(hf), hf.moe_intermediate_size, routing, _sparse_layers(hf))
    return _qwen3(hf) | {"rope_rules": RopeRules(is_partial=True), "experts": experts}


def _qwen3_vl_moe(hf: HfConfig) -> dict[str, Any]:
    return _qwen3(hf) | {"experts": _qwen_experts(hf, is_normalised=True)}


def _qwen2_moe(hf: HfConfig) -> dict[str, Any]:
    experts = _qwen_experts(hf, shared_size=hf.shared_expert_intermediate_size, has_shared_gate=True)
    return {"qkv_bias": hf.qkv_bias, "experts": experts}


def _qwen_experts(hf: HfConfig, is_normalised: bool | None = None, **shared: Any) -> ExpertsConfig:
    """`is_normalised`: whether weights are, where the configuration does not say."""
    layers = tuple(
        index not in hf.mlp_only_layers and (index + 1) % hf.decoder_sparse_step == 0
        for index in range(hf.num_hidden_layers)
    )
    if is_normalised is None:
        is_normalised = hf.norm_topk_prob
    routing = Routing(hf.num_experts_per_tok, is_normalised=is_normalised)
    return ExpertsConfig(_expert_count(hf), hf.moe_intermediate_size, routing, layers, **shared)


def _hunyuan_moe(hf: HfConfig) -> dict[str, Any]:
    """Shared experts are as large as one. Layers could differ by their fields, and do not in what is published."""
    size, layers = hf.intermediate_size, hf.num_hidden_layers
    for name, computed in (("num_shared_expert", 1), ("moe_intermediate_size", size)):
        if _of_all_layers(hf, name) not in (None, computed):
            raise ValueError(f"{hf.model_type} models with {name} {getattr(hf, name)} are not supported")
    routing = Routing(_of_all_layers(hf, "moe_topk"))
    experts = ExpertsConfig(_of_all_layers(hf, "num_experts"), size, routing, (True,) * layers, shared_size=size)
    return _hunyuan(hf) | {"experts": experts}


def _of_all_layers(hf: HfConfig, name: str) -> Any:
    """A field that may have a value for each layer; None if it is missing. Raises ValueError if layers differ."""
    said = getattr(hf, name, None)
    if isinstance(said, list):
        if len(set(said)) > 1:
            raise ValueError(f"{hf.model_type} models whose layers differ in {name} are not supported")
        return said[0]
    return said


def _olmoe(hf: HfConfig) -> dict[str, Any]:
    if getattr(hf, "clip_qkv", None) is not None:
        raise ValueError(f"{hf.model_type} models with clip_qkv are not supported")
    routing = Routing(hf.num_experts_per_tok, is_normalised=hf.norm_topk_prob)
    layers = (True,) * hf.num_hidden_layers
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "qk_norm": "all",
        "experts": ExpertsConfig(_expert_count(hf), hf.intermediate_size, routing, layers),
    }


def _flex_olmo(hf: HfConfig) -> dict[str, Any]:
    return _olmo2(hf) | {"experts": _olmoe(hf)["experts"]}


def _granite_moe(hf: HfConfig) -> dict[str, Any]:
    experts = ExpertsConfig(
        _expert_count(hf),
        hf.intermediate_size,
        Routing(hf.num_experts_per_tok),
        (True,) * hf.num_hidden_layers,
        shared_size=getattr(hf, "shared_intermediate_size", 0),
    )
    return _granite(hf) | {"experts": experts}


def _refuse_other_than(hf: HfConfig, **computed: Any) -> None:
    """Raises ValueError if one of these fields, which `transformers` does not read, says something else than what is
    computed. A field that is missing or None says nothing."""
    for name, value in computed.items():
        if (said := getattr(hf, name, None)) is not None and said != value:
            raise ValueError(f"{hf.model_type} models with {name} {said!r} are not supported")


def _prediction_layers(hf: HfConfig) -> int:
    """Number of layers for the prediction of several tokens, which a checkpoint has after the others."""
    return int(getattr(hf, "num_nextn_predict_layers", 0) or getattr(hf, "num_mtp_layers", 0))


def _sigmoid_experts(hf: HfConfig, layers: tuple[bool, ...] | None = None) -> ExpertsConfig:
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
    return ExpertsConfig(_expert_count(hf), hf.moe_intermediate_size, routing, layers, shared_size, has_bias=True)


def _ungrouped_sigmoid_experts(
    hf: HfConfig, size: int, layers: tuple[bool, ...], scale: float = 1.0, shared: int = 0
) -> ExpertsConfig:
    """The same without groups, with `shared` experts that all tokens use. `size`: of an expert."""
    routing = Routing(hf.num_experts_per_tok, "sigmoid", scale=scale, added_to_sum=1e-20)
    return ExpertsConfig(_expert_count(hf), size, routing, layers, size * shared, has_bias=True)


def _glm4_moe(hf: HfConfig) -> dict[str, Any]:
    return {
        "qkv_bias": hf.attention_bias,
        "qk_norm": "head" if getattr(hf, "use_qk_norm", False) else None,
        "rope_rules": RopeRules(is_partial=True),
        "experts": _sigmoid_experts(hf),
        "extra_layers": _prediction_layers(hf),
    }


def _dots1(hf: HfConfig) -> dict[str, Any]:
    return _qwen3(hf) | {"experts": _sigmoid_experts(hf)}


def _solar_open(hf: HfConfig) -> dict[str, Any]:
    _refuse_other_than(hf, use_qk_norm=False, first_k_dense_replace=0)
    return {
        "intermediate_size": hf.moe_intermediate_size,  # the layers have no other MLP
        "qkv_bias": hf.attention_bias,
        "rope_rules": RopeRules(is_partial=True),
        "experts": _sigmoid_experts(hf, (True,) * hf.num_hidden_layers),
    }


def _exaone_moe(hf: HfConfig) -> dict[str, Any]:
    return _exaone(hf) | {"experts": _sigmoid_experts(hf, _sparse_layers(hf))}


def _minimax_m2(hf: HfConfig) -> dict[str, Any]:
    _refuse_other_than(
        hf, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", shared_intermediate_size=0
    )
    if not all(getattr(hf, "attn_type_list", None) or [True]):
        raise ValueError("minimax_m2 models with linear attention are not supported")
    return {
        "qk_norm": "all",
        "rope_rules": RopeRules(is_partial=True),
        "experts": _ungrouped_sigmoid_experts(hf, hf.intermediate_size, (True,) * hf.num_hidden_layers),
    }


def _afmoe(hf: HfConfig) -> dict[str, Any]:
    _refuse_other_than(
        hf, score_func="sigmoid", route_norm=True, n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1
    )
    if hf.attention_bias:
        raise ValueError("afmoe models with attention_bias are not supported")
    layers = tuple(index >= hf.num_dense_layers for index in range(hf.num_hidden_layers))
    return {
        "qk_norm": "head",
        "output_gate": True,
        "float32_norms": True,
        "sandwich_norms": True,
        "embedding_scale": hf.hidden_size**0.5 if hf.mup_enabled else 1.0,
        "rope_rules": _rotated_windows(hf),
        "experts": _ungrouped_sigmoid_experts(
            hf, hf.moe_intermediate_size, layers, hf.route_scale, hf.num_shared_experts or 0
        ),
    }


def _hy_v3(hf: HfConfig) -> dict[str, Any]:
    _refuse_other_than(hf, qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, n_group=1)
    experts = _ungrouped_sigmoid_experts(
        hf, hf.moe_intermediate_size, _sparse_layers(hf), hf.router_scaling_factor, hf.num_shared_experts or 0
    )
    return _qwen3(hf) | {"mlp_bias": hf.mlp_bias, "experts": experts, "extra_layers": _prediction_layers(hf)}


def _ernie_moe(hf: HfConfig) -> dict[str, Any]:
    if hf.use_bias:
        raise ValueError("ernie4_5_moe models with biases are not supported")
    layers = tuple(
        (index + 1) % hf.moe_layer_interval == 0 and hf.moe_layer_start_index <= index <= hf.moe_layer_end_index
        for index in range(hf.num_hidden_layers)
    )
    experts = ExpertsConfig(
        _expert_count(hf),
        hf.moe_intermediate_size,
        Routing(hf.moe_k, added_to_sum=hf.moe_norm_min),
        layers,
        hf.moe_intermediate_size * hf.moe_num_shared_experts,
        has_bias=True,
    )
    return _ernie(hf) | {"experts": experts}


def _latent(hf: HfConfig) -> dict[str, Any]:
    """Multi-head latent attention. YaRN multiplies scores by the square of a temperature, which is not that of the
    rotation (`Rope.amplitude`)."""
    if hf.attention_bias:
        raise ValueError(f"{hf.model_type} models with attention_bias are not supported")
    heads = LatentHeads(hf.kv_lora_rank, hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim)
    if heads.v_head_dim > heads.query:
        raise ValueError(f"{hf.model_type} models whose values have more elements than queries are not supported")
    scale, rope = heads.query**-0.5, hf.rope_parameters
    if rope.get("rope_type", "default") != "default" and (over := rope.get("mscale_all_dim")):
        scale *= yarn_temperature(rope["factor"], over) ** 2
    return {
        "latent": heads,
        "q_lora_rank": hf.q_lora_rank,
        "num_kv_heads": 1,
        "head_dim": heads.row,
        "attention_scale": scale,
        "rope_rules": RopeRules(is_interleaved=getattr(hf, "rope_interleave", True), head_dim=hf.qk_rope_head_dim),
    }


def _deepseek_v2(hf: HfConfig) -> dict[str, Any]:
    if hf.norm_topk_prob:
        raise ValueError("deepseek_v2 models with norm_topk_prob are not supported")
    is_grouped = {"greedy": False, "group_limited_greedy": True}.get(hf.topk_method)
    if is_grouped is None:
        raise ValueError(f"deepseek_v2 models with topk_method {hf.topk_method!r} are not supported")
    routing = Routing(
        hf.num_experts_per_tok,
        is_normalised=False,
        scale=hf.routed_scaling_factor,
        groups=hf.n_group if is_grouped else 1,
        groups_kept=hf.topk_group if is_grouped else 1,
        group_top=1,
    )
    layers = tuple(index >= hf.first_k_dense_replace for index in range(hf.num_hidden_layers))
    shared_size = hf.moe_intermediate_size * hf.n_shared_experts
    return _latent(hf) | {
        "experts": ExpertsConfig(_expert_count(hf), hf.moe_intermediate_size, routing, layers, shared_size)
    }


def _deepseek_v3(hf: HfConfig) -> dict[str, Any]:
    return _latent(hf) | {"experts": _sigmoid_experts(hf), "extra_layers": _prediction_layers(hf)}


def _glm4_moe_lite(hf: HfConfig) -> dict[str, Any]:
    experts = _sigmoid_experts(hf, _sparse_layers(hf))
    return _latent(hf) | {"experts": experts, "extra_layers": _prediction_layers(hf)}


def _mistral4(hf: HfConfig) -> dict[str, Any]:
    routing = Routing(
        hf.num_experts_per_tok,
        is_normalised=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        groups=hf.n_group or 1,
        groups_kept=hf.topk_group or 1,
        added_to_sum=1e-20,
    )
    layers = tuple(index >= (hf.first_k_dense_replace or 0) for index in range(hf.num_hidden_layers))
    shared_size = hf.moe_intermediate_size * hf.n_shared_experts
    return _latent(hf) | {
        "query_temperature": _temperature(hf),
        "experts": ExpertsConfig(_expert_count(hf), hf.moe_intermediate_size, routing, layers, shared_size),
    }


def _gpt_oss(hf: HfConfig) -> dict[str, Any]:
    experts = ExpertsConfig(
        _expert_count(hf),
        hf.intermediate_size,
        Routing(hf.num_experts_per_tok),
        (True,) * hf.num_hidden_layers,
        has_product_biases=True,
        # Published configurations, and older versions of transformers, lack alpha.
        activation=ClampedSwiGLU(hf.swiglu_limit, getattr(hf, "swiglu_alpha", 1.702)),
    )
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "has_sinks": True, "experts": experts}


def _llama4(hf: HfConfig) -> dict[str, Any]:
    """A token's one expert computes the hidden state times the score."""
    if hf.num_experts_per_tok != 1:
        raise ValueError(f"llama4 models with {hf.num_experts_per_tok} experts a token are not supported")
    layers = range(hf.num_hidden_layers)
    temperature = QueryTemperature(hf.floor_scale, hf.attn_scale, first=1, in_rotated=False)
    experts = ExpertsConfig(
        _expert_count(hf),
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


def _delta_nets(hf: HfConfig, is_fused: bool) -> dict[str, Any]:
    """Layers with a gated delta net among layers of gated attention."""
    states = StateShape(
        hf.linear_num_key_heads,
        hf.linear_num_value_heads,
        hf.linear_key_head_dim,
        hf.linear_value_head_dim,
        hf.linear_conv_kernel_dim,
    )
    layers = tuple(kind == "linear_attention" for kind in hf.layer_types)
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "qk_norm": "head",
        "gemma_norms": True,
        "output_gate": True,
        "rope_rules": RopeRules(is_partial=True),
        "recurrent": DeltaNetConfig(states, layers, hf.rms_norm_eps, is_fused),
    }


def _qwen3_next(hf: HfConfig) -> dict[str, Any]:
    experts = _qwen_experts(hf, shared_size=hf.shared_expert_intermediate_size, has_shared_gate=True)
    return _delta_nets(hf, is_fused=True) | {"experts": experts}


def _qwen3_5(hf: HfConfig) -> dict[str, Any]:
    return _delta_nets(hf, is_fused=False)


def _qwen3_5_moe(hf: HfConfig) -> dict[str, Any]:
    experts = ExpertsConfig(
        _expert_count(hf),
        hf.moe_intermediate_size,
        Routing(hf.num_experts_per_tok, is_normalised=True),
        (True,) * hf.num_hidden_layers,
        hf.shared_expert_intermediate_size,
        has_shared_gate=True,
    )
    # The layers have no other MLP, so the configuration has no size of one.
    return _delta_nets(hf, is_fused=False) | {"experts": experts, "intermediate_size": hf.moe_intermediate_size}


def _mamba2(hf: HfConfig, layers: tuple[bool, ...]) -> Mamba2Config | None:
    """Layers with Mamba2, as Bamba names their sizes; None if there are none."""
    states = StateShape(hf.mamba_n_groups, hf.mamba_n_heads, hf.mamba_d_state, hf.mamba_d_head, hf.mamba_d_conv)
    return _mamba2_layers(hf, layers, states, hf.hidden_act, hf.rms_norm_eps, hf.mamba_conv_bias)


def _mamba2_layers(
    hf: HfConfig, layers: tuple[bool, ...], states: StateShape, activation: str, eps: float, has_bias: bool
) -> Mamba2Config | None:
    if hf.mamba_proj_bias:
        raise ValueError(f"{hf.model_type} models with mamba_proj_bias are not supported")
    least, most = hf.time_step_limit or (0.0, math.inf)
    if least > 0.0 or most < math.inf:
        raise ValueError(f"{hf.model_type} models with time_step_limit {[least, most]} are not supported")
    if activation != "silu":
        raise ValueError(f"{hf.model_type} models with activation {activation!r} are not supported")
    group_size = states.value_heads * states.value_dim // states.key_heads
    return Mamba2Config(states, layers, eps, has_bias, group_size) if any(layers) else None


def _granite_hybrid(hf: HfConfig) -> dict[str, Any]:
    """Granite 4. Without experts, each layer has what is the shared one elsewhere."""
    rotates = hf.position_embedding_type == "rope"
    return (_granite_moe(hf) if hf.num_local_experts else _granite(hf)) | {
        "intermediate_size": hf.shared_intermediate_size,
        "rope_rules": RopeRules(layers=dict.fromkeys(range(hf.num_hidden_layers), rotates)),
        "recurrent": _mamba2(hf, tuple(kind == "linear_attention" for kind in hf.layer_types)),
    }


def _bamba(hf: HfConfig) -> dict[str, Any]:
    with_attention = set(hf.attn_layer_indices or ())
    return _llama(hf) | {
        "rope_rules": RopeRules(is_partial=True),
        "recurrent": _mamba2(hf, tuple(index not in with_attention for index in range(hf.num_hidden_layers))),
    }


def _nemotron_h_experts(hf: HfConfig) -> ExpertsConfig:
    """Experts of Nemotron 3. The configuration says the size of the shared ones together."""
    if hf.mlp_bias:
        raise ValueError("nemotron_h models with experts and mlp_bias are not supported")
    experts = _sigmoid_experts(hf, tuple(kind == "moe" for kind in hf.layers_block_type))
    return replace(experts, shared_size=hf.moe_shared_expert_intermediate_size, latent_size=hf.moe_latent_size)


def _nemotron_h(hf: HfConfig) -> dict[str, Any]:
    """Each layer has one sublayer: Mamba2, attention, an MLP or experts. Nothing rotates."""
    for name in ("use_bias", "attention_bias", "sliding_window"):
        if getattr(hf, name):
            raise ValueError(f"nemotron_h models with {name} are not supported")
    kinds = hf.layers_block_type
    states = StateShape(hf.n_groups, hf.mamba_num_heads, hf.ssm_state_size, hf.mamba_head_dim, hf.conv_kernel)
    eps, with_mamba2 = hf.layer_norm_epsilon, tuple(kind == "linear_attention" for kind in kinds)
    return {
        "norm_eps": eps,
        "mlp_bias": hf.mlp_bias,
        "gated_mlps": False,
        "rope_rules": RopeRules(layers=dict.fromkeys(range(len(kinds)), False)),
        "sublayers": tuple("mlp" if kind in ("mlp", "moe") else "attention" for kind in kinds),
        "experts": _nemotron_h_experts(hf) if "moe" in kinds else None,
        "recurrent": _mamba2_layers(hf, with_mamba2, states, hf.mamba_hidden_act, eps, hf.use_conv_bias),
    }


def _short_convolutions(hf: HfConfig) -> dict[str, Any]:
    """Layers with a short convolution among layers of attention. Ranks divide channels in groups, of which each takes
    whole ones: matrix products on a GPU have sizes that are multiples of 16."""
    if hf.conv_L_cache < 2:
        raise ValueError(f"{hf.model_type} models with conv_L_cache {hf.conv_L_cache} are not supported")
    if not hf.layer_types:
        raise ValueError(f"{hf.model_type} models without layer_types are not supported")
    layers, size = tuple(kind == "conv" for kind in hf.layer_types), math.gcd(hf.hidden_size, 16)
    states = StateShape(hf.hidden_size // size, hf.hidden_size // size, 0, size, hf.conv_L_cache)
    recurrent = ShortConvolutionConfig(states, layers, hf.conv_bias)
    return {"norm_eps": hf.norm_eps, "qk_norm": "head", "recurrent": recurrent if any(layers) else None}


def _lfm2(hf: HfConfig) -> dict[str, Any]:
    """The configuration may have the MLP's size before it is made two thirds of it, and a multiple of a number."""
    inner = hf.intermediate_size
    if hf.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if hf.block_ffn_dim_multiplier is not None:
            inner = -(-int(hf.block_ffn_dim_multiplier * inner) // hf.block_multiple_of) * hf.block_multiple_of
    return _short_convolutions(hf) | {"intermediate_size": inner}


def _lfm2_moe(hf: HfConfig) -> dict[str, Any]:
    experts = ExpertsConfig(
        _expert_count(hf),
        hf.moe_intermediate_size,
        Routing(hf.num_experts_per_tok, "sigmoid", hf.norm_topk_prob, hf.routed_scaling_factor, added_to_sum=1e-6),
        tuple(index >= hf.num_dense_layers for index in range(hf.num_hidden_layers)),
        has_bias=hf.use_expert_bias,
    )
    return _short_convolutions(hf) | {"experts": experts}


# Differences from a plain Llama without biases, by `model_type`. An entry `rope_rules` is a `RopeRules`.
ARCHITECTURES: dict[str, Callable[[HfConfig], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral3": _ministral3,
    "internlm3": _llama,
    "iquestcoder": _llama,
    "arcee": _arcee,
    "nemotron": _nemotron,
    "starcoder2": _starcoder2,
    "qwen2": _qwen2,
    "qwen2_5_vl_text": _qwen2,
    "qwen3": _qwen3,
    "qwen3_vl_text": _qwen3,
    "seed_oss": _seed_oss,
    "cwm": _cwm,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "smollm3": _smollm3,
    "granite": _granite,
    "hyperclovax": _hyperclovax,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "exaone4": _exaone4,
    "phi3": _phi3,
    "hunyuan_v1_dense": _hunyuan,
    "glm": _glm,
    "glm4": _glm4,
    "glm4v_text": _glm4v,
    "ernie4_5": _ernie,
    "mixtral": _mixtral,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_vl_moe,
    "mellum": _mellum,
    "hunyuan_v1_moe": _hunyuan_moe,
    "olmoe": _olmoe,
    "flex_olmo": _flex_olmo,
    "granitemoe": _granite_moe,
    "granitemoeshared": _granite_moe,
    "glm4_moe": _glm4_moe,
    "glm4v_moe_text": _glm4_moe,
    "dots1": _dots1,
    "solar_open": _solar_open,
    "exaone_moe": _exaone_moe,
    "minimax_m2": _minimax_m2,
    "hy_v3": _hy_v3,
    "afmoe": _afmoe,
    "ernie4_5_moe": _ernie_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "mistral4": _mistral4,
    "youtu": _latent,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "granitemoehybrid": _granite_hybrid,
    "bamba": _bamba,
    "nemotron_h": _nemotron_h,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
}
