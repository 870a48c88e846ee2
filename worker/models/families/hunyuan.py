"""Hunyuan, dense and with experts."""

from typing import Any

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_rules import refuse_other_than


def hunyuan(hf: HfConfig) -> Differences:
    refuse_other_than(hf, use_qk_norm=True, use_cla=False)
    if (kind := hf.rope_parameters["rope_type"]) in ("yarn", "longrope"):  # norms would undo their amplitude
        raise ValueError(f"{hf.model_type} models with rope_type {kind!r} are not supported")
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "qk_norm": "after"}


def hunyuan_moe(hf: HfConfig) -> Differences:
    """Shared experts are as large as one. Layers could differ by their fields, and do not in what is published."""
    size, layers = hf.intermediate_size, hf.num_hidden_layers
    for name, computed in (("num_shared_expert", 1), ("moe_intermediate_size", size)):
        if _of_all_layers(hf, name) not in (None, computed):
            raise ValueError(f"{hf.model_type} models with {name} {getattr(hf, name)} are not supported")
    routing = Routing(_of_all_layers(hf, "moe_topk"))
    experts = ExpertsConfig(_of_all_layers(hf, "num_experts"), size, routing, (True,) * layers, shared_size=size)
    return hunyuan(hf) | {"experts": experts}


def _of_all_layers(hf: HfConfig, name: str) -> Any:
    """A field that may have a value for each layer; None if it is missing. Raises ValueError if layers differ."""
    said = getattr(hf, name, None)
    if isinstance(said, list):
        if len(set(said)) > 1:
            raise ValueError(f"{hf.model_type} models whose layers differ in {name} are not supported")
        return said[0]
    return said


_NAMES = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
FAMILIES = {
    "hunyuan_v1_dense": Family(hunyuan, names=_NAMES),
    "hunyuan_v1_moe": Family(hunyuan_moe, names={**_NAMES, "gate.wg": "gate", "shared_mlp": "shared_experts"}),
}
