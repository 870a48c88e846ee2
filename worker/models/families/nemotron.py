"""Nemotron-4 and Minitron: MLPs without a gate, norms that subtract the mean, a part of each head rotates."""

from worker.models.family import Differences, Family, HfConfig, RopeRules


def nemotron(hf: HfConfig) -> Differences:
    norms = {"norm_eps": hf.norm_eps, "layer_norms": True, "gemma_norms": True}
    return norms | {"gated_mlps": False, "rope_rules": RopeRules(is_partial=True)}


FAMILIES = {"nemotron": Family(nemotron)}
