"""GLM-4, with experts and with latent attention too, and the text part of GLM-4V."""

from worker.models.families.deepseek import latent
from worker.models.family import Differences, Family, HfConfig, RopeRules
from worker.models.family_experts import prediction_layers, sigmoid_experts, sparse_layers


def glm(hf: HfConfig) -> Differences:
    return {"out_bias": False, "rope_rules": RopeRules(is_partial=True, is_interleaved=True)}


def glm4(hf: HfConfig) -> Differences:
    return glm(hf) | {"sandwich_norms": True}


def glm4_moe(hf: HfConfig) -> Differences:
    return {
        "out_bias": False,
        "qk_norm": "head" if getattr(hf, "use_qk_norm", False) else None,
        "rope_rules": RopeRules(is_partial=True),
        "experts": sigmoid_experts(hf),
        "extra_layers": prediction_layers(hf),
    }


def glm4_moe_lite(hf: HfConfig) -> Differences:
    experts = sigmoid_experts(hf, sparse_layers(hf))
    return latent(hf) | {"experts": experts, "extra_layers": prediction_layers(hf)}


_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_GLM4_MOE = Family(glm4_moe, text_of=("glm4v_moe", "glm46v"), ignored=("visual",))
FAMILIES = {
    "glm": Family(glm, fused_gate_up=True),
    "glm4": Family(glm4, norms=_NORMS, fused_gate_up=True),
    "glm4v_text": Family(
        lambda hf: glm4(hf) | {"qkv_bias": True},
        norms=_NORMS,
        fused_gate_up=True,
        text_of=("glm4v", "glm46v"),
        ignored=("visual",),
    ),
    "glm4_moe": _GLM4_MOE,
    "glm4v_moe_text": _GLM4_MOE,
    "glm4_moe_lite": Family(glm4_moe_lite),
}
