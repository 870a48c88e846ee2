"""Hy3."""

from worker.models.families.qwen3 import qwen3
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import prediction_layers, sparse_layers, ungrouped_sigmoid_experts
from worker.models.family_rules import refuse_other_than


def hy_v3(hf: HfConfig) -> Differences:
    refuse_other_than(hf, qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, n_group=1)
    experts = ungrouped_sigmoid_experts(
        hf, hf.moe_intermediate_size, sparse_layers(hf), hf.router_scaling_factor, hf.num_shared_experts or 0
    )
    return qwen3(hf) | {"mlp_bias": hf.mlp_bias, "experts": experts, "extra_layers": prediction_layers(hf)}


_NAMES = {
    "mlp.router.gate": "mlp.gate",
    "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "shared_mlp": "shared_experts",
}
FAMILIES = {"hy_v3": Family(hy_v3, names=_NAMES)}
