"""Normalisation: by the root of the mean square (https://arxiv.org/abs/1910.07467), or of layers
(https://arxiv.org/abs/1607.06450)."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns `x / sqrt(mean(x²) + eps) * weight` over the last dimension, with the shape and dtype of x.

    Computed in the weight's dtype: a model that multiplies in float32 whatever its own dtype is (Gemma) keeps the
    weight in float32.
    """
    if x.is_cuda and x.ndim == 2:
        from kernels.ops import fused

        return fused.rms_norm(x, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def normalise(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The `rms_norm` of x, `[n, size]`, with the weights `norm`, `[size]`; or its layer norm, with the weights and
    biases `norm`, `[2, size]`, or weights alone, `[1, size]`. Each is computed in the dtype of `norm`, and has that of
    x."""
    if norm.ndim == 1:
        return rms_norm(x, norm, eps)
    biases = norm[1] if len(norm) > 1 else None
    return F.layer_norm(x.to(norm.dtype), norm.shape[1:], norm[0], biases, eps).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Does `residual += x` in place, and returns the `rms_norm` of the sum. x, residual: contiguous `[n, size]`, of the
    same dtype."""
    if x.is_cuda:
        from kernels.ops import fused

        return fused.add_rms_norm(x, residual, weight, eps)
    residual += x
    return rms_norm(residual, weight, eps)
