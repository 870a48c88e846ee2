"""Command R and Command A: attention and MLP side by side, through one norm."""

from dataclasses import replace

from kernels.experts.choice import Routing
from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than, rotated_windows
from worker.models.family_experts import experts_of, sparse_layers


def cohere(hf: HfConfig) -> Differences:
    refuse_other_than(hf, use_qk_norm=False)
    return {
        "norm_eps": hf.layer_norm_eps,
        "layer_norms": True,
        "norm_biases": False,
        "float32_norms": True,
        "parallel": "one norm",
        "logit_scale": 1.0 if hf.logit_scale is None else hf.logit_scale,
        "rope_rules": RopeRules(is_interleaved=True),
    }


def cohere2(hf: HfConfig) -> Differences:
    refuse_other_than(hf, position_embedding_type="rope_gptj", rotary_pct=1.0, use_gated_activation=True)
    refuse_other_than(hf, use_parallel_block=True, order_of_interleaved_layers="local_attn_first")
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
    own, mlps_rotate = cohere2(hf), hf.prefix_dense_sliding_window_pattern == 1
    of_windows = own["rope_rules"].layers.items()
    rotated = {index: rotates or (mlps_rotate and not layers[index]) for index, rotates in of_windows}
    if hf.rms_norm_eps is not None:
        own |= {"norm_eps": hf.rms_norm_eps, "layer_norms": False, "float32_norms": False}
    return own | {
        "rope_rules": RopeRules(is_interleaved=True, layers=rotated),
        "intermediate_size": hf.prefix_dense_intermediate_size or size,
        "experts": experts_of(hf, routing, size, layers, shared_size=size * hf.num_shared_experts),
        "weight_factors": {"mlp.shared_experts.down_proj.weight": (0.5,)} if is_mean else {},
    }


_VISIONS, _OF_IMAGES = ("aya_vision", "cohere2_vision"), ("vision_tower", "multi_modal_projector")
FAMILIES = {
    "cohere": Family(cohere, text_of=_VISIONS, ignored=_OF_IMAGES),
    "cohere2": Family(cohere2, text_of=_VISIONS, ignored=_OF_IMAGES),
    "cohere2_moe": Family(cohere2_moe, text_of=_VISIONS, ignored=_OF_IMAGES),
}
