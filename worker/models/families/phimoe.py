"""Phi-3.5-MoE: experts by SparseMixer."""

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.families.mistral import MIXTRAL_NAMES, mistral
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import expert_count


def phimoe(hf: HfConfig) -> Differences:
    if hf.num_experts_per_tok != 2:
        raise ValueError(f"phimoe models with {hf.num_experts_per_tok} experts a token are not supported")
    routing = Routing(2, "sparsemixer", jitter=hf.router_jitter_noise)
    every = (True,) * hf.num_hidden_layers
    return mistral(hf) | {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "layer_norms": True,
        "head_bias": hf.lm_head_bias,
        "experts": ExpertsConfig(expert_count(hf), hf.intermediate_size, routing, every),
    }


FAMILIES = {"phimoe": Family(phimoe, names={**MIXTRAL_NAMES, "mlp.router": "mlp.gate"})}
