"""Mellum 2."""

from kernels.experts.choice import Routing
from worker.models.families.qwen import qwen3
from worker.models.family import Differences, Family, HfConfig, RopeRules
from worker.models.family_experts import experts_of, sparse_layers


def mellum(hf: HfConfig) -> Differences:
    routing = Routing(hf.num_experts_per_tok, is_normalised=hf.norm_topk_prob)
    experts = experts_of(hf, routing, layers=sparse_layers(hf))
    return qwen3(hf) | {"rope_rules": RopeRules(is_partial=True), "experts": experts}


FAMILIES = {"mellum": Family(mellum, ignored=("mtp",))}
