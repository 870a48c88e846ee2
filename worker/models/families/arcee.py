"""AFM: MLPs have no gate."""

from worker.models.families.llama import llama
from worker.models.family import Differences, Family, HfConfig


def arcee(hf: HfConfig) -> Differences:
    return llama(hf) | {"gated_mlps": False}


FAMILIES = {"arcee": Family(arcee)}
