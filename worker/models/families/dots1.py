"""dots.llm1."""

from worker.models.families.qwen3 import qwen3
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import sigmoid_experts


def dots1(hf: HfConfig) -> Differences:
    return qwen3(hf) | {"experts": sigmoid_experts(hf)}


FAMILIES = {"dots1": Family(dots1)}
