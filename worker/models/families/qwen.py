"""Qwen2 and Qwen3, with experts too, and the text parts of Qwen2.5-VL and Qwen3-VL."""

from typing import Any

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.families.mistral import mistral
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import experts_of


def qwen2(hf: HfConfig) -> Differences:
    return {"qkv_bias": True, "out_bias": False, "mlp_bias": False}


def qwen2_moe(hf: HfConfig) -> Differences:
    experts = qwen_experts(hf, shared_size=hf.shared_expert_intermediate_size, has_shared_gate=True)
    return qwen2(hf) | {"qkv_bias": hf.qkv_bias, "experts": experts}


def qwen3(hf: HfConfig) -> Differences:
    return {"qk_norm": "head", "mlp_bias": False}


def qwen3_moe(hf: HfConfig) -> Differences:
    return qwen3(hf) | mistral(hf) | {"experts": qwen_experts(hf)}


def qwen3_vl_moe(hf: HfConfig) -> Differences:
    return qwen3(hf) | {"experts": qwen_experts(hf, is_normalised=True)}


def qwen_experts(hf: HfConfig, is_normalised: bool | None = None, **shared: Any) -> ExpertsConfig:
    """`is_normalised`: whether weights are, where the configuration does not say."""
    layers = tuple(
        index not in hf.mlp_only_layers and (index + 1) % hf.decoder_sparse_step == 0
        for index in range(hf.num_hidden_layers)
    )
    if is_normalised is None:
        is_normalised = hf.norm_topk_prob
    return experts_of(hf, Routing(hf.num_experts_per_tok, is_normalised=is_normalised), layers=layers, **shared)


SHARED_EXPERT = {"shared_expert": "shared_experts"}
FAMILIES = {
    "qwen2": Family(qwen2),
    "qwen2_5_vl_text": Family(qwen2, text_of=("qwen2_5_vl",), ignored=("visual",)),
    "qwen2_moe": Family(qwen2_moe, names=SHARED_EXPERT),
    "qwen3": Family(qwen3),
    "qwen3_vl_text": Family(qwen3, text_of=("qwen3_vl",), ignored=("visual",)),
    "qwen3_moe": Family(qwen3_moe),
    "qwen3_vl_moe_text": Family(
        qwen3_vl_moe,
        text_of=("qwen3_vl_moe",),
        ignored=("visual",),
        turned=("experts.gate_up_proj", "experts.down_proj"),  # as published; `transformers` 5 writes them as others'
    ),
}
