"""Granite 4: most layers have Mamba2, or all have attention."""

from worker.models.families.bamba import mamba2
from worker.models.families.granite import NAMES, granite, granite_moe
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_rules import RopeRules


def granite_hybrid(hf: HfConfig) -> Differences:
    """Granite 4. Without experts, each layer has what is the shared one elsewhere."""
    rotates = hf.position_embedding_type == "rope"
    return (granite_moe(hf) if hf.num_local_experts else granite(hf)) | {
        "intermediate_size": hf.shared_intermediate_size,
        "rope_rules": RopeRules(layers=dict.fromkeys(range(hf.num_hidden_layers), rotates)),
        "recurrent": mamba2(hf, tuple(kind == "linear_attention" for kind in hf.layer_types)),
    }


FAMILIES = {"granitemoehybrid": Family(granite_hybrid, names=NAMES, fused_gate_up=True, mlp="mlp.shared_experts")}
