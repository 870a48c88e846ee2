"""Bamba, and Mamba2 as other families have it too."""

import math

from kernels.recurrent.shape import StateShape
from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than
from worker.models.mamba2 import Mamba2Config


def mamba2(hf: HfConfig, layers: tuple[bool, ...]) -> Mamba2Config | None:
    """Layers with Mamba2, as Bamba names their sizes; None if there are none."""
    states = StateShape(hf.mamba_n_groups, hf.mamba_n_heads, hf.mamba_d_state, hf.mamba_d_head, hf.mamba_d_conv)
    return mamba2_layers(hf, layers, states, hf.hidden_act, hf.rms_norm_eps, hf.mamba_conv_bias)


def mamba2_layers(
    hf: HfConfig, layers: tuple[bool, ...], states: StateShape, activation: str, eps: float, has_bias: bool
) -> Mamba2Config | None:
    refuse_other_than(hf, mamba_proj_bias=False)
    least, most = hf.time_step_limit or (0.0, math.inf)
    if least > 0.0 or most < math.inf:
        raise ValueError(f"{hf.model_type} models with time_step_limit {[least, most]} are not supported")
    if activation != "silu":
        raise ValueError(f"{hf.model_type} models with activation {activation!r} are not supported")
    group_size = states.value_heads * states.value_dim // states.key_heads
    return Mamba2Config(states, layers, eps, has_bias, group_size) if any(layers) else None


def bamba(hf: HfConfig) -> Differences:
    with_attention = set(hf.attn_layer_indices or ())
    states = mamba2(hf, tuple(index not in with_attention for index in range(hf.num_hidden_layers)))
    return {"rope_rules": RopeRules(is_partial=True), "recurrent": states}


NAMES = {"feed_forward": "mlp", "final_layernorm": "norm"}
NORMS = ("input_layernorm", None, "pre_ff_layernorm", None)
FAMILIES = {"bamba": Family(bamba, names=NAMES, norms=NORMS)}
