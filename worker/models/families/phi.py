"""Phi-1 to Phi-2: attention and MLP side by side."""

from worker.models.family import Differences, Family, HfConfig
from worker.models.family_rules import RopeRules, refuse_other_than


def phi(hf: HfConfig) -> Differences:
    refuse_other_than(hf, qk_layernorm=False)
    return {
        "norm_eps": hf.layer_norm_eps,
        "layer_norms": True,
        "parallel": "one norm",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "gated_mlps": False,
        "rope_rules": RopeRules(is_partial=True),
    }


_NAMES = {"final_layernorm": "norm", "dense": "o_proj", "fc1": "up_proj", "fc2": "down_proj"}
FAMILIES = {"phi": Family(phi, names=_NAMES)}
