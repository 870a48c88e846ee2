"""Phi-1 to Phi-2, with attention and MLP side by side; Phi-3 and Phi-4; Phi-3.5-MoE, with experts by SparseMixer."""

from kernels.experts.choice import Routing
from worker.models.families.mistral import MIXTRAL_NAMES, mistral
from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than
from worker.models.family_experts import experts_of


def phi(hf: HfConfig) -> Differences:
    refuse_other_than(hf, qk_layernorm=False)
    return {
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "head_bias", "layer_norms"), True),
        "norm_eps": hf.layer_norm_eps,
        "parallel": "one norm",
        "gated_mlps": False,
        "rope_rules": RopeRules(is_partial=True),
    }


def phi3(hf: HfConfig) -> Differences:
    return mistral(hf) | {"rope_rules": RopeRules(is_partial=True)}


def phimoe(hf: HfConfig) -> Differences:
    refuse_other_than(hf, num_experts_per_tok=2)
    routing = Routing(2, "sparsemixer", jitter=hf.router_jitter_noise)
    own = {"layer_norms": True, "head_bias": hf.lm_head_bias}
    return mistral(hf) | own | {"experts": experts_of(hf, routing, hf.intermediate_size)}


_NAMES = {"final_layernorm": "norm", "dense": "o_proj", "fc1": "up_proj", "fc2": "down_proj"}
FAMILIES = {
    "phi": Family(phi, names=_NAMES),
    "phi3": Family(phi3, fused_qkv="one after the other", fused_gate_up=True),
    "phimoe": Family(phimoe, names={**MIXTRAL_NAMES, "mlp.router": "mlp.gate"}),
}
