"""Filters and random draws in PyTorch, for whole batches on a GPU.

The filters, the uniform numbers and the inversion of the cumulative distribution in the order of ids are those of
`worker.sampling.topk_topp_cpu`, so both draw the same tokens up to rounding. Nothing here waits for the device.

Top-k and top-p use FlashInfer's kernels, which search for the threshold, on a GPU with FlashInfer, and a sort
elsewhere. They differ in ties: FlashInfer keeps all tokens that are exactly as likely as the last one kept, the sort
keeps those with the smaller ids.
"""

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

_BLOCK = 512


class Filters(NamedTuple):
    """Filters of each row. A filter that no row uses is None.

    | field | dtype | off |
    | --- | --- | --- |
    | `top_k` | int32[n] | vocabulary size |
    | `top_p` | float32[n] | 1 |
    | `min_p` | float32[n] | 0 |
    """

    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return any(tensor is not None for tensor in self)


def draw(probs: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws a token id for each row, int64[n], from `probs` float32[n, vocab] with `uniforms` float64[n]. A row of NaN
    gets an arbitrary token."""
    if filters:
        probs = probs.masked_fill(probs[:, :1].isnan(), 1.0 / probs.shape[1])
    if filters.top_k is not None:
        probs = _top_k(probs, filters.top_k)
    if filters.top_p is not None:
        probs = _top_p(probs, filters.top_p)
    if filters.min_p is not None:
        probs = torch.where(probs >= filters.min_p[:, None] * probs.amax(dim=1, keepdim=True), probs, 0.0)
    return invert(probs, uniforms)


def _top_k(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keeps the `top_k` likeliest tokens of each row, renormalised."""
    vocab = probs.shape[1]
    kernels = _kernels(probs.device.type)
    if kernels is not None:
        kept = kernels.top_k_renorm_probs(probs, top_k.clamp(max=vocab - 1), is_deterministic=True)
    else:
        ranked, ids = probs.sort(dim=1, descending=True, stable=True)
        ranked.masked_fill_(torch.arange(vocab, device=probs.device) >= top_k[:, None], 0.0)
        kept = torch.zeros_like(probs).scatter_(1, ids, ranked)
        kept.div_(kept.sum(dim=1, keepdim=True, dtype=torch.float64).float())
    return torch.where(top_k[:, None] < vocab, kept, probs)


def _top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the fewest tokens of each row that together reach `top_p`. With `top_p` 1 the row is left as it is:
    rounding must not cut its tail."""
    kernels = _kernels(probs.device.type)
    if kernels is not None:
        kept = kernels.top_p_renorm_probs(probs, top_p, is_deterministic=True)
    else:
        ranked, ids = probs.sort(dim=1, descending=True, stable=True)
        drop = ranked.cumsum(dim=1, dtype=torch.float64) - ranked >= top_p[:, None]
        drop[:, 0] = False
        kept = torch.zeros_like(probs).scatter_(1, ids, ranked.masked_fill_(drop, 0.0))
    return torch.where(top_p[:, None] < 1, kept, probs)


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The column, int64[n], at which each row's cumulative weight passes `uniforms` (float64[n], in [0, 1)) times its
    sum. A column of weight 0 is never returned unless all are 0.

    The sums of blocks come first, then those inside one block. So the sums are float64 without a float64 copy of the
    whole vocabulary.
    """
    n, vocab = weights.shape
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK))
    blocks = weights.view(n, -1, _BLOCK)
    sums = blocks.sum(dim=2, dtype=torch.float64)
    cumulative = sums.cumsum(dim=1)
    target = uniforms * cumulative[:, -1]
    block = _passed(cumulative, target, sums)
    at = block[:, None]
    target = target - (cumulative.gather(1, at) - sums.gather(1, at))[:, 0]
    inside = blocks.gather(1, at[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    column = block * _BLOCK + _passed(inside.cumsum(dim=1), target, inside)
    return column.clamp_(0, vocab - 1)


def _passed(cumulative: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative weight exceeds `target`, but at most the last column with a weight: rounding
    may put the target at the sum itself."""
    column = (cumulative <= target[:, None]).sum(dim=1)
    positions = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, positions, 0).amax(dim=1)
    return torch.minimum(column, last)


@cache
def _kernels(device_type: str) -> ModuleType | None:
    """FlashInfer's sampling module, or None where it cannot be used."""
    if device_type != "cuda":
        return None
    try:
        from flashinfer import sampling
    except ImportError:
        return None
    return sampling
