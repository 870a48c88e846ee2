"""Queries that grow with the position, so that attention over long contexts stays sharp."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QueryTemperature:
    """A query at position p is multiplied by `1 + factor * log(1 + floor((p + first) / tokens))`
    (https://arxiv.org/abs/2501.19399).

    | field | meaning |
    | --- | --- |
    | `tokens` | number of positions that have one factor |
    | `factor` | of the logarithm |
    | `first` | number of the first position |
    | `in_rotated` | whether it is in layers that rotate; in others it always is |
    """

    tokens: float
    factor: float
    first: int = 0
    in_rotated: bool = True

    def apply(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Multiplies queries `[n, num_heads, query_size]` in place, and returns them. positions: int64 `[n]`."""
        scales = torch.log1p(((positions + self.first) / self.tokens).floor()) * self.factor + 1.0
        return queries.mul_(scales.to(queries.dtype)[:, None, None])
