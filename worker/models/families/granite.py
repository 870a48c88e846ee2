"""Granite 3 and Granite Swash, with experts too."""

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import expert_count
from worker.models.family_rules import RopeRules, scaled_residuals


def granite(hf: HfConfig) -> Differences:
    return scaled_residuals(hf, hf.embedding_multiplier, hf.residual_multiplier) | {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "mlp_bias": getattr(hf, "mlp_bias", False),
        "attention_scale": hf.attention_multiplier,
        "logit_scale": 1.0 / hf.logits_scaling,
    }


def swash_attention(hf: HfConfig) -> Differences:
    """Attention of Granite Swash. A layer with base 0 does not rotate."""
    thetas = tuple(float(theta) for theta in hf.layer_rope_theta)
    rotated = {index: theta != 0 for index, theta in enumerate(thetas)}
    return {"has_sinks": True, "rope_rules": RopeRules(layers=rotated, thetas=thetas)}


def granite_swa(hf: HfConfig) -> Differences:
    return granite(hf) | swash_attention(hf)


def granite_moe(hf: HfConfig) -> Differences:
    experts = ExpertsConfig(
        expert_count(hf),
        hf.intermediate_size,
        Routing(hf.num_experts_per_tok),
        (True,) * hf.num_hidden_layers,
        shared_size=getattr(hf, "shared_intermediate_size", 0),
    )
    return granite(hf) | {"experts": experts}


def granite_moe_swa(hf: HfConfig) -> Differences:
    return granite_moe(hf) | swash_attention(hf)


NAMES = {
    "block_sparse_moe": "mlp",
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.router": "mlp.gate",
    "block_sparse_moe.router.layer": "mlp.gate",
    "shared_mlp.input_linear": "mlp.shared_experts.gate_up_proj",
    "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
}
FAMILIES = {
    "granite": Family(granite),
    "granite_swa": Family(granite_swa),
    "granitemoe": Family(granite_moe, names=NAMES),
    "granitemoeshared": Family(granite_moe, names=NAMES, fused_gate_up=True),
    "granitemoe_swa": Family(granite_moe_swa, names=NAMES, fused_gate_up=True),
}
