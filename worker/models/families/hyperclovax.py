"""HyperCLOVA X: as Granite, with norms after sublayers too."""

from worker.models.families.granite import granite
from worker.models.family import Differences, Family, HfConfig


def hyperclovax(hf: HfConfig) -> Differences:
    """Norms after sublayers come before the multiplier, which `granite` cannot undo."""
    if hf.use_post_norm and hf.residual_multiplier != 1.0:
        raise ValueError(f"hyperclovax models with residual_multiplier {hf.residual_multiplier} are not supported")
    return granite(hf) | {"sandwich_norms": hf.use_post_norm, "logit_scale": hf.logits_scaling}


_NORMS = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
FAMILIES = {"hyperclovax": Family(hyperclovax, norms=_NORMS)}
