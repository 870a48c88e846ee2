"""Rows of `worker.models.families`: hybrids, most of whose layers have recurrent states in place of attention."""

import math
from dataclasses import replace
from typing import Any

from kernels.experts.choice import Routing
from kernels.recurrent.shape import StateShape
from worker.models.dense_families import granite, llama
from worker.models.family_experts import granite_moe, qwen_experts, sigmoid_experts
from worker.models.experts import ExpertsConfig
from worker.models.family_rules import HfConfig, RopeRules, expert_count, refuse_other_than
from worker.models.gated_delta_net import DeltaNetConfig
from worker.models.mamba2 import Mamba2Config
from worker.models.output_gate import OutputGate
from worker.models.short_convolution import ShortConvolutionConfig


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
        "output_gate": OutputGate(),
        "rope_rules": RopeRules(is_partial=True),
        "recurrent": DeltaNetConfig(states, layers, hf.rms_norm_eps, is_fused),
    }


def qwen3_next(hf: HfConfig) -> dict[str, Any]:
    experts = qwen_experts(hf, shared_size=hf.shared_expert_intermediate_size, has_shared_gate=True)
    return _delta_nets(hf, is_fused=True) | {"experts": experts}


def qwen3_5(hf: HfConfig) -> dict[str, Any]:
    return _delta_nets(hf, is_fused=False)


def qwen3_5_moe(hf: HfConfig) -> dict[str, Any]:
    experts = ExpertsConfig(
        expert_count(hf),
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


def granite_hybrid(hf: HfConfig) -> dict[str, Any]:
    """Granite 4. Without experts, each layer has what is the shared one elsewhere."""
    rotates = hf.position_embedding_type == "rope"
    return (granite_moe(hf) if hf.num_local_experts else granite(hf)) | {
        "intermediate_size": hf.shared_intermediate_size,
        "rope_rules": RopeRules(layers=dict.fromkeys(range(hf.num_hidden_layers), rotates)),
        "recurrent": _mamba2(hf, tuple(kind == "linear_attention" for kind in hf.layer_types)),
    }


def bamba(hf: HfConfig) -> dict[str, Any]:
    with_attention = set(hf.attn_layer_indices or ())
    return llama(hf) | {
        "rope_rules": RopeRules(is_partial=True),
        "recurrent": _mamba2(hf, tuple(index not in with_attention for index in range(hf.num_hidden_layers))),
    }


def falcon_h1(hf: HfConfig) -> dict[str, Any]:
    """Each layer has attention and Mamba2 side by side. Factors of attention's inputs and keys are those of its scores
    and outputs; the others are those of weights."""
    refuse_other_than(
        hf, mamba_use_mlp=True, mamba_rms_norm=False, attention_bias=False, mlp_bias=False, projectors_bias=False
    )
    states = _mamba2(hf, (True,) * hf.num_hidden_layers)
    assert states is not None, "all layers have Mamba2"
    gate, inputs, keys, queries, steps = (hf.ssm_in_multiplier * factor for factor in hf.ssm_multipliers)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    mlp_gate, mlp_down = hf.mlp_multipliers
    return {
        "embedding_scale": hf.embedding_multiplier,
        "logit_scale": hf.lm_head_multiplier,
        "attention_scale": head_dim**-0.5 * hf.key_multiplier * hf.attention_in_multiplier**2,
        "recurrent": replace(states, has_norm=False, alongside_attention=True),
        "weight_factors": {
            "self_attn.o_proj.weight": (hf.attention_in_multiplier * hf.attention_out_multiplier,),
            "mamba.in_proj.weight": (inputs, keys, queries, gate, steps),
            "mamba.out_proj.weight": (hf.ssm_out_multiplier,),
            "mlp.gate_proj.weight": (mlp_gate,),
            "mlp.down_proj.weight": (mlp_down,),
        },
    }


def _nemotron_h_experts(hf: HfConfig) -> ExpertsConfig:
    """Experts of Nemotron 3. The configuration says the size of the shared ones together."""
    if hf.mlp_bias:
        raise ValueError("nemotron_h models with experts and mlp_bias are not supported")
    experts = sigmoid_experts(hf, tuple(kind == "moe" for kind in hf.layers_block_type))
    return replace(experts, shared_size=hf.moe_shared_expert_intermediate_size, latent_size=hf.moe_latent_size)


def nemotron_h(hf: HfConfig) -> dict[str, Any]:
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


def lfm2(hf: HfConfig) -> dict[str, Any]:
    """The configuration may have the MLP's size before it is made two thirds of it, and a multiple of a number."""
    inner = hf.intermediate_size
    if hf.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if hf.block_ffn_dim_multiplier is not None:
            inner = -(-int(hf.block_ffn_dim_multiplier * inner) // hf.block_multiple_of) * hf.block_multiple_of
    return _short_convolutions(hf) | {"intermediate_size": inner}


def lfm3(hf: HfConfig) -> dict[str, Any]:
    refuse_other_than(hf, attention_bias=False)
    return _short_convolutions(hf) | {
        "sandwich_norms": hf.use_sandwich_norm,
        "output_gate": OutputGate(is_per_head=True) if hf.use_attention_gate else None,
    }


def lfm2_moe(hf: HfConfig) -> dict[str, Any]:
    experts = ExpertsConfig(
        expert_count(hf),
        hf.moe_intermediate_size,
        Routing(hf.num_experts_per_tok, "sigmoid", hf.norm_topk_prob, hf.routed_scaling_factor, added_to_sum=1e-6),
        tuple(index >= hf.num_dense_layers for index in range(hf.num_hidden_layers)),
        has_bias=hf.use_expert_bias,
    )
    return _short_convolutions(hf) | {"experts": experts}
