"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; shape and dtype of x.

    The quotient is float32, rounded to the weight's dtype before the product: a model that multiplies in float32
    (Gemma) keeps this weight in float32.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled.to(weight.dtype) * weight).to(x.dtype)
