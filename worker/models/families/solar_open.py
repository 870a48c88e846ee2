"""Solar Open."""

from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than
from worker.models.family_experts import sigmoid_experts


def solar_open(hf: HfConfig) -> Differences:
    refuse_other_than(hf, use_qk_norm=False, first_k_dense_replace=0)
    return {
        "intermediate_size": hf.moe_intermediate_size,  # the layers have no other MLP
        "out_bias": False,
        "rope_rules": RopeRules(is_partial=True),
        "experts": sigmoid_experts(hf, (True,) * hf.num_hidden_layers),
    }


FAMILIES = {"solar_open": Family(solar_open)}
