"""MiniCPM3: latent attention, and multipliers as Granite's."""

from worker.models.families.deepseek import latent
from worker.models.family import Differences, Family, HfConfig, RopeRules, scaled_residuals


def minicpm3(hf: HfConfig) -> Differences:
    own = latent(hf) | scaled_residuals(hf, hf.scale_emb, hf.scale_depth / hf.num_hidden_layers**0.5)
    rules = RopeRules(head_dim=hf.qk_rope_head_dim)
    return own | {"logit_scale": hf.dim_model_base / hf.hidden_size, "rope_rules": rules}


FAMILIES = {"minicpm3": Family(minicpm3)}
