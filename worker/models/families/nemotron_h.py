"""Nemotron-H and Nemotron 3: each layer has one sublayer."""

from dataclasses import replace

from kernels.recurrent.shape import StateShape
from worker.models.experts import ExpertsConfig
from worker.models.families.bamba import mamba2_layers
from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than
from worker.models.family_experts import sigmoid_experts


def _nemotron_h_experts(hf: HfConfig) -> ExpertsConfig:
    """Experts of Nemotron 3. The configuration says the size of the shared ones together."""
    if hf.mlp_bias:
        raise ValueError("nemotron_h models with experts and mlp_bias are not supported")
    experts = sigmoid_experts(hf, tuple(kind == "moe" for kind in hf.layers_block_type))
    return replace(experts, shared_size=hf.moe_shared_expert_intermediate_size, latent_size=hf.moe_latent_size)


def nemotron_h(hf: HfConfig) -> Differences:
    """Each layer has one sublayer: Mamba2, attention, an MLP or experts. Nothing rotates."""
    refuse_other_than(hf, use_bias=False, attention_bias=False, sliding_window=None)
    kinds = hf.layers_block_type
    states = StateShape(hf.n_groups, hf.mamba_num_heads, hf.ssm_state_size, hf.mamba_head_dim, hf.conv_kernel)
    layers, eps = tuple(kind == "linear_attention" for kind in kinds), hf.layer_norm_epsilon
    return {
        "norm_eps": eps,
        "gated_mlps": False,
        "rope_rules": RopeRules(layers=dict.fromkeys(range(len(kinds)), False)),
        "sublayers": tuple("mlp" if kind in ("mlp", "moe") else "attention" for kind in kinds),
        "experts": _nemotron_h_experts(hf) if "moe" in kinds else None,
        "recurrent": mamba2_layers(hf, layers, states, hf.mamba_hidden_act, eps, hf.use_conv_bias),
    }


# A layer's one sublayer is its mixer, whatever it is.
_OF_MLPS = ("up_proj", "down_proj", "gate", "experts", "shared_experts", "fc1_latent_proj", "fc2_latent_proj")
_NAMES = {
    "backbone": "model",
    "embeddings": "embed_tokens",
    "norm_f": "norm",
    "mixer": "mamba",
    **{f"mixer.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"mixer.{name}": f"mlp.{name}" for name in _OF_MLPS},
}
FAMILIES = {"nemotron_h": Family(nemotron_h, names=_NAMES, ignored=("mtp",))}
