"""Command R and Command A: attention and MLP side by side, through one norm."""

from dataclasses import replace

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import expert_count, sparse_layers
from worker.models.family_rules import RopeRules, refuse_other_than, rotated_windows


def cohere(hf: HfConfig) -> Differences:
    refuse_other_than(hf, use_qk_norm=False)
    return {
        "norm_eps": hf.layer_norm_eps,
        "layer_norms": True,
        "norm_biases": False,
        "float32_norms": True,
        "parallel": "one norm",
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "logit_scale": 1.0 if hf.logit_scale is None else hf.logit_scale,
        "rope_rules": RopeRules(is_interleaved=True),
    }


def cohere2(hf: HfConfig) -> Differences:
    refuse_other_than(
        hf,
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        use_gated_activation=True,
        use_parallel_block=True,
        order_of_interleaved_layers="local_attn_first",
    )
    return cohere(hf) | {"rope_rules": replace(rotated_windows(hf), is_interleaved=True)}


def cohere2_moe(hf: HfConfig) -> Differences:
    """Layers with an MLP may rotate without a window too."""
    kinds = {"sigmoid": hf.norm_topk_prob, "softmax": True}
    if (kind := hf.expert_selection_fn) not in kinds:
        raise ValueError(f"cohere2_moe models with expert_selection_fn {kind!r} are not supported")
    if (joined := hf.shared_expert_combination_strategy) not in ("sum", "average"):
        raise ValueError(f"cohere2_moe models with shared_expert_combination_strategy {joined!r} are not supported")
    is_mean = hf.num_shared_experts > 0 and joined == "average"
    routing = Routing(hf.num_experts_per_tok, kind, kinds[kind], scale=0.5 if is_mean else 1.0)
    layers, size = sparse_layers(hf), hf.intermediate_size
    experts = ExpertsConfig(expert_count(hf), size, routing, layers, size * hf.num_shared_experts)
    own, mlps_rotate = cohere2(hf), hf.prefix_dense_sliding_window_pattern == 1
    rotated = {
        index: is_rotated or (mlps_rotate and not layers[index])
        for index, is_rotated in own["rope_rules"].layers.items()
    }
    if hf.rms_norm_eps is not None:
        own |= {"norm_eps": hf.rms_norm_eps, "layer_norms": False, "float32_norms": False}
    return own | {
        "rope_rules": RopeRules(is_interleaved=True, layers=rotated),
        "intermediate_size": hf.prefix_dense_intermediate_size or size,
        "experts": experts,
        "weight_factors": {"mlp.shared_experts.down_proj.weight": (0.5,)} if is_mean else {},
    }


_VISIONS, _OF_IMAGES = ("aya_vision", "cohere2_vision"), ("vision_tower", "multi_modal_projector")
FAMILIES = {
    "cohere": Family(cohere, text_of=_VISIONS, ignored=_OF_IMAGES),
    "cohere2": Family(cohere2, text_of=_VISIONS, ignored=_OF_IMAGES),
    "cohere2_moe": Family(cohere2_moe, text_of=_VISIONS, ignored=_OF_IMAGES),
}
