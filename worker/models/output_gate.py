"""Gates of what attention gives, which a token's hidden states make."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class OutputGate:
    """Gates of the outputs of heads.

    | field | meaning |
    | --- | --- |
    | `is_per_head` | a head's elements have one gate; else each has its own |
    | `activation` | what is made of the product that gives the gates; softplus is computed in float32 |
    """

    is_per_head: bool = False
    activation: Literal["sigmoid", "softplus"] = "sigmoid"

    def size(self, num_heads: int, head_dim: int) -> int:
        """Number of gates of a token."""
        return num_heads if self.is_per_head else num_heads * head_dim

    def apply(self, heads: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """The outputs of heads `[n, num_heads, head_dim]` times their gates. gates: `[n, size]`."""
        is_sigmoid = self.activation == "sigmoid"
        factors = gates.sigmoid() if is_sigmoid else F.softplus(gates.float()).to(heads.dtype)
        return heads * (factors[..., None] if self.is_per_head else factors.view_as(heads))
