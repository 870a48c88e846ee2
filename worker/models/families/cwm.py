"""Code World Model: windows in some layers."""

from worker.models.family import Differences, Family, HfConfig


def cwm(hf: HfConfig) -> Differences:
    return {"mlp_bias": hf.mlp_bias}


FAMILIES = {"cwm": Family(cwm)}
