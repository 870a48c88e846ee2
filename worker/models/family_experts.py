"""Experts as several families have them."""

from typing import Any

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.family import HfConfig

_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")  # names of the number of shared experts


def expert_count(hf: HfConfig) -> int:
    """Number of experts of a layer. Raises ValueError if the configuration has none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = next((value for name in names if (value := getattr(hf, name, None))), None)
    if count is None:
        raise ValueError(f"the configuration of the {hf.model_type} model says no number of experts")
    return int(count)


def experts_of(
    hf: HfConfig, routing: Routing, size: int | None = None, layers: tuple[bool, ...] | None = None, **own: Any
) -> ExpertsConfig:
    """Experts in `layers`, by default in all. `size`: of an expert, by default `moe_intermediate_size`. `own`: other
    fields of `ExpertsConfig`."""
    size = hf.moe_intermediate_size if size is None else size
    return ExpertsConfig(expert_count(hf), size, routing, layers or (True,) * hf.num_hidden_layers, **own)


def sparse_layers(hf: HfConfig) -> tuple[bool, ...]:
    """For each layer whether it has experts."""
    return tuple(kind == "sparse" for kind in hf.mlp_layer_types)


def layers_from(first: int, hf: HfConfig) -> tuple[bool, ...]:
    """The same, where all layers from the number `first` on have."""
    return tuple(index >= first for index in range(hf.num_hidden_layers))


def sigmoid_experts(hf: HfConfig, layers: tuple[bool, ...] | None = None) -> ExpertsConfig:
    """Experts as DeepSeek-V3 has them. `layers` says which layers have them, where the configuration does not say how
    many at the begin have not."""
    if getattr(hf, "scoring_func", None) == "softmax":
        raise ValueError(f"{hf.model_type} models with scoring_func 'softmax' are not supported")
    scale, groups = hf.routed_scaling_factor, (hf.n_group, hf.topk_group)
    routing = Routing(hf.num_experts_per_tok, "sigmoid", hf.norm_topk_prob, scale, *groups, added_to_sum=1e-20)
    if layers is None:
        layers = layers_from(hf.first_k_dense_replace, hf)
    shared = next((value for name in _SHARED_EXPERTS if (value := getattr(hf, name, None))), 0)
    return experts_of(hf, routing, layers=layers, shared_size=hf.moe_intermediate_size * shared, has_bias=True)


def ungrouped_sigmoid_experts(
    hf: HfConfig, size: int, layers: tuple[bool, ...], scale: float = 1.0, shared: int = 0
) -> ExpertsConfig:
    """The same without groups, with `shared` experts that all tokens use. `size`: of an expert."""
    routing = Routing(hf.num_experts_per_tok, "sigmoid", scale=scale, added_to_sum=1e-20)
    return experts_of(hf, routing, size, layers, shared_size=size * shared, has_bias=True)


def prediction_layers(hf: HfConfig) -> int:
    """Number of layers for the prediction of several tokens, which a checkpoint has after the others."""
    return int(getattr(hf, "num_nextn_predict_layers", 0) or getattr(hf, "num_mtp_layers", 0))
