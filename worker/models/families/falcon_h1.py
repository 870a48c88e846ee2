"""Falcon-H1: attention and Mamba2 side by side."""

from dataclasses import replace

from worker.models.families.bamba import NAMES, NORMS, mamba2
from worker.models.family import Differences, Family, HfConfig, refuse_other_than


def falcon_h1(hf: HfConfig) -> Differences:
    """Each layer has attention and Mamba2 side by side. Factors of attention's inputs and keys are those of its scores
    and outputs; the others are those of weights."""
    refuse_other_than(
        hf, mamba_use_mlp=True, mamba_rms_norm=False, attention_bias=False, mlp_bias=False, projectors_bias=False
    )
    states = mamba2(hf, (True,) * hf.num_hidden_layers)
    assert states is not None, "all layers have Mamba2"
    gate, inputs, keys, queries, steps = (hf.ssm_in_multiplier * factor for factor in hf.ssm_multipliers)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    mlp_gate, mlp_down = hf.mlp_multipliers
    return {
        "embedding_scale": hf.embedding_multiplier,
        "logit_scale": hf.lm_head_multiplier,
        "attention_scale": head_dim**-0.5 * hf.key_multiplier * hf.attention_in_multiplier**2,
        "recurrent": replace(states, has_norm=False, alongside_attention=True),
        "weight_factors": {
            "self_attn.o_proj.weight": (hf.attention_in_multiplier * hf.attention_out_multiplier,),
            "mamba.in_proj.weight": (inputs, keys, queries, gate, steps),
            "mamba.out_proj.weight": (hf.ssm_out_multiplier,),
            "mlp.gate_proj.weight": (mlp_gate,),
            "mlp.down_proj.weight": (mlp_down,),
        },
    }


FAMILIES = {"falcon_h1": Family(falcon_h1, names=NAMES, norms=NORMS)}
