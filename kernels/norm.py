"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467)."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; shape and dtype of x.

    Taken in the weight's dtype: a model that multiplies in float32 whatever it runs in (Gemma) keeps the weight so.
    """
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
