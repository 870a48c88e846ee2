"""Parts that families share: rules of rotation, factors of residuals, and refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.models.family import Differences, HfConfig


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


def refuse_other_than(hf: HfConfig, **computed: Any) -> None:
    """Raises ValueError if one of these fields, some of which `transformers` does not read, says something else than
    what is computed. A field that is missing or None says nothing."""
    for name, value in computed.items():
        if (said := getattr(hf, name, None)) is not None and said != value:
            raise ValueError(f"{hf.model_type} models with {name} {said!r} are not supported")


def scaled_residuals(hf: HfConfig, embedding: float, residual: float) -> Differences:
    """Embeddings are multiplied by one number, and sublayers' outputs by another as they are added. The decoder keeps
    the hidden states divided by the latter, which norms undo: their epsilon is divided by its square."""
    return {"norm_eps": hf.rms_norm_eps / residual**2, "embedding_scale": embedding / residual}


def rotated_windows(hf: HfConfig) -> RopeRules:
    """Layers with a window rotate, and those without do not."""
    return RopeRules(layers={index: kind == "sliding_attention" for index, kind in enumerate(hf.layer_types)})
