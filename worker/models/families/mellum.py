"""Mellum 2."""

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.families.qwen3 import qwen3
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import expert_count, sparse_layers
from worker.models.family_rules import RopeRules


def mellum(hf: HfConfig) -> Differences:
    routing = Routing(hf.num_experts_per_tok, is_normalised=hf.norm_topk_prob)
    experts = ExpertsConfig(expert_count(hf), hf.moe_intermediate_size, routing, sparse_layers(hf))
    return qwen3(hf) | {"rope_rules": RopeRules(is_partial=True), "experts": experts}


FAMILIES = {"mellum": Family(mellum, ignored=("mtp",))}
