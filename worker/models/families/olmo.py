"""OLMo 2 and 3, OLMoE and FlexOlmo."""

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import expert_count


def olmo2(hf: HfConfig) -> Differences:
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "qk_norm": "all",
        "pre_norms": False,
        "sandwich_norms": True,
    }


def olmoe(hf: HfConfig) -> Differences:
    if getattr(hf, "clip_qkv", None) is not None:
        raise ValueError(f"{hf.model_type} models with clip_qkv are not supported")
    routing = Routing(hf.num_experts_per_tok, is_normalised=hf.norm_topk_prob)
    layers = (True,) * hf.num_hidden_layers
    return {
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "qk_norm": "all",
        "experts": ExpertsConfig(expert_count(hf), hf.intermediate_size, routing, layers),
    }


def flex_olmo(hf: HfConfig) -> Differences:
    return olmo2(hf) | {"experts": olmoe(hf)["experts"]}


FAMILIES = {"olmo2": Family(olmo2), "olmo3": Family(olmo2), "olmoe": Family(olmoe), "flex_olmo": Family(flex_olmo)}
