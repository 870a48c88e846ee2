"""EXAONE 4 and K-EXAONE."""

from worker.models.family import Differences, Family, HfConfig, RopeRules, rotated_windows
from worker.models.family_experts import sigmoid_experts, sparse_layers


def exaone(hf: HfConfig) -> Differences:
    """Attention of EXAONE 4. Models without windows rotate in all layers."""
    return {"qk_norm": "head", "rope_rules": RopeRules() if hf.sliding_window is None else rotated_windows(hf)}


def exaone4(hf: HfConfig) -> Differences:
    return exaone(hf) | {"pre_norms": False, "sandwich_norms": True}


def exaone_moe(hf: HfConfig) -> Differences:
    return exaone(hf) | {"experts": sigmoid_experts(hf, sparse_layers(hf))}


_NAMES = {"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"}
FAMILIES = {
    "exaone4": Family(exaone4, text_of=("exaone4_5",), ignored=("visual", "mtp")),
    "exaone_moe": Family(exaone_moe, names=_NAMES, ignored=("mtp",)),
}
