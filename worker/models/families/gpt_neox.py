"""GPT-NeoX and Pythia: attention and MLP side by side, through a norm each."""

from worker.models.family import Differences, Family, HfConfig
from worker.models.family_rules import RopeRules


def gpt_neox(hf: HfConfig) -> Differences:
    return {
        "norm_eps": hf.layer_norm_eps,
        "layer_norms": True,
        "parallel": "two norms" if hf.use_parallel_residual else None,
        "num_kv_heads": hf.num_attention_heads,
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "mlp_bias": True,
        "gated_mlps": False,
        "rope_rules": RopeRules(is_partial=True),
    }


FAMILIES = {"gpt_neox": Family(gpt_neox)}
