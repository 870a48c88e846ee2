"""Granite 3 and Granite Swash, with experts too, and Granite 4, where most layers have Mamba2 or all have attention."""

from kernels.experts.choice import Routing
from worker.models.families.bamba import mamba2
from worker.models.family import Differences, Family, HfConfig, RopeRules, scaled_residuals
from worker.models.family_experts import experts_of


def granite(hf: HfConfig) -> Differences:
    return scaled_residuals(hf, hf.embedding_multiplier, hf.residual_multiplier) | {
        "attention_scale": hf.attention_multiplier,
        "logit_scale": 1.0 / hf.logits_scaling,
    }


def granite_moe(hf: HfConfig) -> Differences:
    routing, shared = Routing(hf.num_experts_per_tok), getattr(hf, "shared_intermediate_size", 0)
    return granite(hf) | {"experts": experts_of(hf, routing, hf.intermediate_size, shared_size=shared)}


def swash_attention(hf: HfConfig) -> Differences:
    """Attention of Granite Swash. A layer with base 0 does not rotate."""
    thetas = tuple(float(theta) for theta in hf.layer_rope_theta)
    rotated = {index: theta != 0 for index, theta in enumerate(thetas)}
    return {"has_sinks": True, "rope_rules": RopeRules(layers=rotated, thetas=thetas)}


def granite_hybrid(hf: HfConfig) -> Differences:
    """Granite 4. Without experts, each layer has what is the shared one elsewhere."""
    rotates = hf.position_embedding_type == "rope"
    return (granite_moe(hf) if hf.num_local_experts else granite(hf)) | {
        "intermediate_size": hf.shared_intermediate_size,
        "rope_rules": RopeRules(layers=dict.fromkeys(range(hf.num_hidden_layers), rotates)),
        "recurrent": mamba2(hf, tuple(kind == "linear_attention" for kind in hf.layer_types)),
    }


_NAMES = {
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
    "granite_swa": Family(lambda hf: granite(hf) | swash_attention(hf)),
    "granitemoe": Family(granite_moe, names=_NAMES),
    "granitemoeshared": Family(granite_moe, names=_NAMES, fused_gate_up=True),
    "granitemoe_swa": Family(lambda hf: granite_moe(hf) | swash_attention(hf), names=_NAMES, fused_gate_up=True),
    "granitemoehybrid": Family(granite_hybrid, names=_NAMES, fused_gate_up=True, mlp="mlp.shared_experts"),
}
