"""Sizes of one layer, in models whose layers differ."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSizes:
    """Fields of `worker.models.config.DecoderConfig` that a layer has of its own."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_before: int = 0
    keys_are_values: bool = False
