"""What Shoal knows of a family: how its configuration maps onto the decoder, and how its checkpoints are laid out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HfConfig = Any
"""A Hugging Face configuration: a `transformers.PretrainedConfig`, or its values as `read_config` keeps them."""

Differences = dict[str, Any]
"""Fields of `DecoderConfig` in which a family differs from a plain Llama without biases. An entry `rope_rules` is a
`RopeRules`."""


@dataclass(frozen=True, eq=False)
class Family:
    """Facts of the models of one `model_type`, or of several that differ in nothing but that name.

    | field | meaning |
    | --- | --- |
    | `config` | the differences from a plain Llama. Raises ValueError for what would be computed wrongly |
    """

    config: Callable[[HfConfig], Differences]
