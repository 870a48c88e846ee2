"""Qwen3, with experts too, and the text part of Qwen3-VL."""

from worker.models.families.qwen2 import qwen_experts
from worker.models.family import Differences, Family, HfConfig


def qwen3(hf: HfConfig) -> Differences:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "qk_norm": "head"}


def qwen3_moe(hf: HfConfig) -> Differences:
    return qwen3(hf) | {"windows": (hf.sliding_window,) * hf.num_hidden_layers, "experts": qwen_experts(hf)}


def qwen3_vl_moe(hf: HfConfig) -> Differences:
    return qwen3(hf) | {"experts": qwen_experts(hf, is_normalised=True)}


FAMILIES = {
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
