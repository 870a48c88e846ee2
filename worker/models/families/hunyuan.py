"""Hunyuan, dense and with experts, and Hy3."""

from typing import Any

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.families.qwen import qwen3
from worker.models.family import Differences, Family, HfConfig, refuse_other_than
from worker.models.family_experts import prediction_layers, sparse_layers, ungrouped_sigmoid_experts


def hunyuan(hf: HfConfig) -> Differences:
    refuse_other_than(hf, use_qk_norm=True, use_cla=False)
    if (kind := hf.rope_parameters["rope_type"]) in ("yarn", "longrope"):  # norms would undo their amplitude
        raise ValueError(f"{hf.model_type} models with rope_type {kind!r} are not supported")
    return {"qk_norm": "after"}


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


def hy_v3(hf: HfConfig) -> Differences:
    refuse_other_than(hf, qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, n_group=1)
    experts = ungrouped_sigmoid_experts(
        hf, hf.moe_intermediate_size, sparse_layers(hf), hf.router_scaling_factor, hf.num_shared_experts or 0
    )
    return qwen3(hf) | {"mlp_bias": hf.mlp_bias, "experts": experts, "extra_layers": prediction_layers(hf)}


_NAMES = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
_HY3_NAMES = {
    "mlp.router.gate": "mlp.gate",
    "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "shared_mlp": "shared_experts",
}
FAMILIES = {
    "hunyuan_v1_dense": Family(hunyuan, names=_NAMES),
    "hunyuan_v1_moe": Family(hunyuan_moe, names={**_NAMES, "gate.wg": "gate", "shared_mlp": "shared_experts"}),
    "hy_v3": Family(hy_v3, names=_HY3_NAMES),
}
