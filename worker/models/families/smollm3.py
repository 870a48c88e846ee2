"""SmolLM3: some layers do not rotate."""

from worker.models.families.llama import llama
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_rules import RopeRules


def smollm3(hf: HfConfig) -> Differences:
    rotated = {index: bool(has_rope) for index, has_rope in enumerate(hf.no_rope_layers)}
    return llama(hf) | {"rope_rules": RopeRules(layers=rotated)}


FAMILIES = {"smollm3": Family(smollm3)}
