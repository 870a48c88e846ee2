"""Parts that the rows of `worker.models.families` share: the configuration that they read, rules of rotation, fields of
several names, and refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HfConfig = Any
"""A Hugging Face configuration: a `transformers.PretrainedConfig`, or its values as `read_config` keeps them."""


@dataclass(frozen=True)
class RopeRules:
    """How a family rotates queries and keys, besides what its configuration says.

    | field | meaning |
    | --- | --- |
    | `is_partial` | only the first dimensions of a head may be rotated |
    | `is_interleaved` | neighbouring dimensions are a pair, in place of dimension i and `i + head_dim / 2` |
    | `layers` | whether the layer of a number is rotated; by default it is |
    | `thetas` | base of each layer's angles, where layers differ in it |
    | `head_dim` | elements of the part of a head that counts as a head here; None: of the whole head |
    """

    is_partial: bool = False
    is_interleaved: bool = False
    layers: Mapping[int, bool] = field(default_factory=dict)
    thetas: tuple[float, ...] | None = None
    head_dim: int | None = None


def expert_count(hf: HfConfig) -> int:
    """Number of experts of a layer. Raises ValueError if the configuration has none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = next((value for name in names if (value := getattr(hf, name, None))), None)
    if count is None:
        raise ValueError(f"the configuration of the {hf.model_type} model says no number of experts")
    return int(count)


def refuse_other_than(hf: HfConfig, **computed: Any) -> None:
    """Raises ValueError if one of these fields, some of which `transformers` does not read, says something else than
    what is computed. A field that is missing or None says nothing."""
    for name, value in computed.items():
        if (said := getattr(hf, name, None)) is not None and said != value:
            raise ValueError(f"{hf.model_type} models with {name} {said!r} are not supported")


def prediction_layers(hf: HfConfig) -> int:
    """Number of layers for the prediction of several tokens, which a checkpoint has after the others."""
    return int(getattr(hf, "num_nextn_predict_layers", 0) or getattr(hf, "num_mtp_layers", 0))
