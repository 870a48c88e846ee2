"""Phi-3 and Phi-4."""

from worker.models.family import Differences, Family, HfConfig
from worker.models.family_rules import RopeRules


def phi3(hf: HfConfig) -> Differences:
    return {"windows": (hf.sliding_window,) * hf.num_hidden_layers, "rope_rules": RopeRules(is_partial=True)}


FAMILIES = {"phi3": Family(phi3, fused_qkv="one after the other", fused_gate_up=True)}
