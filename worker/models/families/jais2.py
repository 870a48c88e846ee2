"""Jais 2: MLPs without a gate, norms that subtract the mean."""

from worker.models.families.llama import llama
from worker.models.family import Differences, Family, HfConfig


def jais2(hf: HfConfig) -> Differences:
    return llama(hf) | {"norm_eps": hf.layer_norm_eps, "layer_norms": True, "gated_mlps": False}


FAMILIES = {"jais2": Family(jais2)}
