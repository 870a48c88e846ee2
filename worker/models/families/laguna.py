"""Laguna: a gate of each head."""

from dataclasses import replace

from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than
from worker.models.family_experts import sparse_layers, ungrouped_sigmoid_experts
from worker.models.layer_sizes import LayerSizes
from worker.models.output_gate import OutputGate


def laguna(hf: HfConfig) -> Differences:
    """Layers with a window may have another number of heads than the others."""
    refuse_other_than(hf, attention_bias=False, moe_router_logit_softcapping=0.0)
    if (gating := hf.gating) not in (True, "per-head", "per-element"):
        raise ValueError(f"laguna models with gating {gating!r} are not supported")
    heads = hf.num_attention_heads_per_layer
    if len(set(zip(hf.layer_types, heads, strict=True))) > len(set(hf.layer_types)):
        raise ValueError("laguna models whose layers of one kind have several numbers of heads are not supported")
    own = [LayerSizes(count, hf.num_key_value_heads, hf.head_dim, hf.intermediate_size) for count in heads]
    experts = ungrouped_sigmoid_experts(hf, hf.moe_intermediate_size, sparse_layers(hf), hf.moe_routed_scaling_factor)
    return {
        "qk_norm": "head",
        "output_gate": OutputGate(gating != "per-element", "softplus"),
        "own_sizes": tuple(own) if len(set(heads)) > 1 else None,
        "num_heads": min(heads),
        "rope_rules": RopeRules(is_partial=True),
        "experts": replace(experts, shared_size=hf.shared_expert_intermediate_size),
    }


_NAMES = {
    "self_attn.g_proj": "self_attn.gate_proj",
    "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "shared_expert": "shared_experts",
}
FAMILIES = {"laguna": Family(laguna, names=_NAMES, own_gates=True)}
