"""Qwen3-Next, Qwen3.5 and Qwen3.6: three of four layers have a gated delta net."""

from kernels.experts.choice import Routing
from kernels.recurrent.shape import StateShape
from worker.models.families.qwen import SHARED_EXPERT, qwen_experts
from worker.models.family import Differences, Family, HfConfig, RopeRules
from worker.models.family_experts import experts_of
from worker.models.gated_delta_net import DeltaNetConfig
from worker.models.output_gate import OutputGate


def delta_nets(hf: HfConfig, is_fused: bool) -> Differences:
    """Layers with a gated delta net among layers of gated attention."""
    heads, sizes = (hf.linear_num_key_heads, hf.linear_num_value_heads), (hf.linear_key_head_dim,)
    states = StateShape(*heads, *sizes, hf.linear_value_head_dim, hf.linear_conv_kernel_dim)
    layers = tuple(kind == "linear_attention" for kind in hf.layer_types)
    return {
        "qk_norm": "head",
        "gemma_norms": True,
        "output_gate": OutputGate(),
        "rope_rules": RopeRules(is_partial=True),
        "recurrent": DeltaNetConfig(states, layers, hf.rms_norm_eps, is_fused),
    }


def qwen3_next(hf: HfConfig) -> Differences:
    experts = qwen_experts(hf, shared_size=hf.shared_expert_intermediate_size, has_shared_gate=True)
    return delta_nets(hf, is_fused=True) | {"experts": experts}


def qwen3_5(hf: HfConfig) -> Differences:
    return delta_nets(hf, is_fused=False)


def qwen3_5_moe(hf: HfConfig) -> Differences:
    routing = Routing(hf.num_experts_per_tok, is_normalised=True)
    experts = experts_of(hf, routing, shared_size=hf.shared_expert_intermediate_size, has_shared_gate=True)
    # The layers have no other MLP, so the configuration has no size of one.
    return qwen3_5(hf) | {"experts": experts, "intermediate_size": hf.moe_intermediate_size}


FAMILIES = {
    "qwen3_next": Family(qwen3_next, names=SHARED_EXPERT, ignored=("mtp",)),
    "qwen3_5_text": Family(qwen3_5, text_of=("qwen3_5",), ignored=("visual", "mtp")),
    "qwen3_5_moe_text": Family(qwen3_5_moe, names=SHARED_EXPERT, text_of=("qwen3_5_moe",), ignored=("visual", "mtp")),
}
