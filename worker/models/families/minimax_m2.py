"""MiniMax-M2: norms over all heads."""

from worker.models.families.mistral import MIXTRAL_NAMES
from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than
from worker.models.family_experts import ungrouped_sigmoid_experts


def minimax_m2(hf: HfConfig) -> Differences:
    refuse_other_than(
        hf, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", shared_intermediate_size=0
    )
    if not all(getattr(hf, "attn_type_list", None) or [True]):
        raise ValueError("minimax_m2 models with linear attention are not supported")
    return {
        "qk_norm": "all",
        "rope_rules": RopeRules(is_partial=True),
        "experts": ungrouped_sigmoid_experts(hf, hf.intermediate_size, (True,) * hf.num_hidden_layers),
    }


_NAMES = {
    **MIXTRAL_NAMES,
    "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
}
FAMILIES = {"minimax_m2": Family(minimax_m2, names=_NAMES)}
