"""LFM2 and LFM3: most layers have a gated short convolution."""

import math

from kernels.experts.choice import Routing
from kernels.recurrent.shape import StateShape
from worker.models.family import Differences, Family, HfConfig, refuse_other_than
from worker.models.family_experts import experts_of, layers_from
from worker.models.output_gate import OutputGate
from worker.models.short_convolution import ShortConvolutionConfig


def _short_convolutions(hf: HfConfig) -> Differences:
    """Layers with a short convolution among layers of attention. Ranks divide channels in groups, of which each takes
    whole ones: matrix products on a GPU have sizes that are multiples of 16."""
    if hf.conv_L_cache < 2:
        raise ValueError(f"{hf.model_type} models with conv_L_cache {hf.conv_L_cache} are not supported")
    if not hf.layer_types:
        raise ValueError(f"{hf.model_type} models without layer_types are not supported")
    layers, size = tuple(kind == "conv" for kind in hf.layer_types), math.gcd(hf.hidden_size, 16)
    states = StateShape(hf.hidden_size // size, hf.hidden_size // size, 0, size, hf.conv_L_cache)
    recurrent = ShortConvolutionConfig(states, layers, hf.conv_bias)
    return {"norm_eps": hf.norm_eps, "qk_norm": "head", "recurrent": recurrent if any(layers) else None}


def lfm2(hf: HfConfig) -> Differences:
    """The configuration may have the MLP's size before it is made two thirds of it, and a multiple of a number."""
    inner = hf.intermediate_size
    if hf.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if hf.block_ffn_dim_multiplier is not None:
            inner = -(-int(hf.block_ffn_dim_multiplier * inner) // hf.block_multiple_of) * hf.block_multiple_of
    return _short_convolutions(hf) | {"intermediate_size": inner}


def lfm3(hf: HfConfig) -> Differences:
    refuse_other_than(hf, attention_bias=False)
    return _short_convolutions(hf) | {
        "sandwich_norms": hf.use_sandwich_norm,
        "output_gate": OutputGate(is_per_head=True) if hf.use_attention_gate else None,
    }


def lfm2_moe(hf: HfConfig) -> Differences:
    normalised, scale = hf.norm_topk_prob, hf.routed_scaling_factor
    routing = Routing(hf.num_experts_per_tok, "sigmoid", normalised, scale, added_to_sum=1e-6)
    layers = layers_from(hf.num_dense_layers, hf)
    experts = experts_of(hf, routing, layers=layers, has_bias=hf.use_expert_bias)
    return _short_convolutions(hf) | {"experts": experts}


_NAMES = {
    "embedding_norm": "norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.g_proj": "self_attn.gate_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "feed_forward": "mlp",
    "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_NORMS = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
_VISIONS, _OF_IMAGES = ("lfm2_vl", "lfm3_vl"), ("vision_tower", "multi_modal_projector")
FAMILIES = {
    "lfm2": Family(lfm2, names=_NAMES, norms=_NORMS, text_of=_VISIONS, ignored=_OF_IMAGES),
    "lfm2_moe": Family(lfm2_moe, names=_NAMES, norms=_NORMS, text_of=_VISIONS, ignored=_OF_IMAGES),
    "lfm3": Family(lfm3, names=_NAMES, norms=_NORMS, text_of=_VISIONS, ignored=_OF_IMAGES, own_gates=True),
}
