"""`worker.draw` in PyTorch, for whole batches on a GPU: the same filters, the same uniform numbers and the same inverse
of the cumulative distribution in the order of ids, so that both draw the same tokens but for rounding. Nothing here
waits for the device.

On a GPU with FlashInfer top-k and top-p are its kernels, which search the threshold; elsewhere a sort. FlashInfer keeps
all tokens that are exactly as likely as the last one kept, the sort those with the smaller ids.
"""

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

_BLOCK = 512


class Filters(NamedTuple):
    """What each row asks for: `top_k` int32[n] (vocabulary size: off), `top_p` float32[n] (1: off), `min_p` float32[n]
    (0: off). None where no row asks."""

    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return any(tensor is not None for tensor in self)


def draw(probs: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
    """One token id a row, int64[n], of `probs` float32[n, vocab] with `uniforms` float64[n]. Rows that are no numbers
    get some token."""
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
    """The `top_k` likeliest of each row, renormalised."""
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
    """The fewest of each row that reach `top_p` together. All where that is 1: rounding must not cost it its tail."""
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
    """The column, int64[n], at which each row's cumulative weight passes `uniforms` (float64[n], in [0, 1)) of its sum;
    never one of weight 0 unless all are. Sums of blocks first, then inside one block: in float64 without ever writing
    the vocabulary in it."""
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
    """The first column whose cumulative weight is more than `target`, or the last that weighs anything: rounding may
    put the target at the sum itself."""
    column = (cumulative <= target[:, None]).sum(dim=1)
    places = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(dim=1)
    return torch.minimum(column, last)


@cache
def _kernels(device_type: str) -> ModuleType | None:
    """FlashInfer's sampling module where it works."""
    if device_type != "cuda":
        return None
    try:
        from flashinfer import sampling
    except ImportError:
        return None
    return sampling
