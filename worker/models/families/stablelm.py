"""StableLM: norms that subtract the mean, a part of each head rotates; some have attention and MLP side by side."""

from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than


def stablelm(hf: HfConfig) -> Differences:
    refuse_other_than(hf, qk_layernorm=False)  # a norm of its own for each head
    return {
        "layer_norms": True,
        "norm_eps": hf.layer_norm_eps,
        "qkv_bias": hf.use_qkv_bias,
        "parallel": "one norm" if hf.use_parallel_residual else None,
        "rope_rules": RopeRules(is_partial=True),
    }


FAMILIES = {"stablelm": Family(stablelm)}
