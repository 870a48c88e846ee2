"""The gates of the delta rule's tokens."""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class TokenGates(NamedTuple):
    """Sources of the decays and strengths of all tokens.

    `decay`, `strength`: outputs of the layer's input product, `[num_tokens, value_heads]`, tokens at any stride.
    `decay_log`, `decay_bias`: the layer's parameters, `[value_heads]`.
    """

    decay: torch.Tensor
    strength: torch.Tensor
    decay_log: torch.Tensor
    decay_bias: torch.Tensor

    @property
    def log_decay(self) -> torch.Tensor:
        """Logarithms of the decays, float32 `[num_tokens, value_heads]`."""
        return -self.decay_log.exp() * F.softplus(self.decay.float() + self.decay_bias)

    @property
    def beta(self) -> torch.Tensor:
        """Strengths between 0 and 1, float32 `[num_tokens, value_heads]`."""
        return self.strength.sigmoid().float()
