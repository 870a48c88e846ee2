"""Nemotron-4 and Minitron: MLPs without a gate, norms that subtract the mean, a part of each head rotates."""

from worker.models.families.llama import llama
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_rules import RopeRules


def nemotron(hf: HfConfig) -> Differences:
    return llama(hf) | {
        "norm_eps": hf.norm_eps,
        "layer_norms": True,
        "gemma_norms": True,
        "gated_mlps": False,
        "rope_rules": RopeRules(is_partial=True),
    }


FAMILIES = {"nemotron": Family(nemotron)}
