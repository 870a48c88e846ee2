"""Qwen2, with experts too, and the text part of Qwen2.5-VL."""

from typing import Any

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import expert_count


def qwen2(hf: HfConfig) -> Differences:
    return {"qkv_bias": True}


def qwen2_moe(hf: HfConfig) -> Differences:
    experts = qwen_experts(hf, shared_size=hf.shared_expert_intermediate_size, has_shared_gate=True)
    return {"qkv_bias": hf.qkv_bias, "experts": experts}


def qwen_experts(hf: HfConfig, is_normalised: bool | None = None, **shared: Any) -> ExpertsConfig:
    """`is_normalised`: whether weights are, where the configuration does not say."""
    layers = tuple(
        index not in hf.mlp_only_layers and (index + 1) % hf.decoder_sparse_step == 0
        for index in range(hf.num_hidden_layers)
    )
    if is_normalised is None:
        is_normalised = hf.norm_topk_prob
    routing = Routing(hf.num_experts_per_tok, is_normalised=is_normalised)
    return ExpertsConfig(expert_count(hf), hf.moe_intermediate_size, routing, layers, **shared)


SHARED_EXPERT = {"shared_expert": "shared_experts"}
FAMILIES = {
    "qwen2": Family(qwen2),
    "qwen2_5_vl_text": Family(qwen2, text_of=("qwen2_5_vl",), ignored=("visual",)),
    "qwen2_moe": Family(qwen2_moe, names=SHARED_EXPERT),
}
