"""OLMo 2 and 3, OLMoE and FlexOlmo."""

from kernels.experts.choice import Routing
from worker.models.family import Differences, Family, HfConfig, refuse_other_than
from worker.models.family_experts import experts_of


def olmo2(hf: HfConfig) -> Differences:
    return {"qk_norm": "all", "pre_norms": False, "sandwich_norms": True}


def olmoe(hf: HfConfig) -> Differences:
    refuse_other_than(hf, clip_qkv=None)
    routing = Routing(hf.num_experts_per_tok, is_normalised=hf.norm_topk_prob)
    return {"qk_norm": "all", "experts": experts_of(hf, routing, hf.intermediate_size)}


FAMILIES = {
    "olmo2": Family(olmo2),
    "olmo3": Family(olmo2),
    "olmoe": Family(olmoe),
    "flex_olmo": Family(lambda hf: olmoe(hf) | olmo2(hf)),
}
