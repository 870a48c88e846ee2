"""`kernels.experts.routing.route` as a Triton kernel: one program a token.

Imported only where there is a GPU (or Triton's interpreter).
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.experts.choice import Routing, choose, count_tokens
from kernels.pdl import launch_dependents, wait_for_previous


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None, load: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.experts.routing.route` for contiguous logits. Experts in groups are chosen by PyTorch's operators."""
    if routing.groups > 1:
        found = choose(logits, routing, bias)
        if load is not None:
            count_tokens(found[0], load)
        return found
    n, experts = logits.shape
    chosen = torch.empty(n, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(n, routing.top_k, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(experts)
    _route[(n,)](
        logits,
        logits if bias is None else bias,
        logits if load is None else load,
        chosen,
        weights,
        experts,
        routing.scale,
        routing.least_sum,
        routing.scores == "sigmoid",
        bias is not None,
        load is not None,
        routing.is_normalised,
        routing.top_k,
        triton.next_power_of_2(routing.top_k),
        block,
        num_warps=1 if block <= 128 else 4,
        **pdl.OPTIONS,
    )
    return chosen, weights


@triton.jit
def _route(
    logits,
    bias,
    load,
    chosen,
    weights,
    experts,
    scale,
    least_sum,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    LOAD: tl.constexpr,
    NORMALISED: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < experts
    wait_for_previous()
    logit = tl.load(logits + token * experts + at, mask=inside, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    rank = score
    if BIAS:
        rank += tl.load(bias + at, mask=inside, other=0.0)
    rank = tl.where(inside, rank, float("-inf"))
    slot = tl.arange(0, SLOTS)
    own = tl.zeros([SLOTS], dtype=tl.int32)
    weight = tl.zeros([SLOTS], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.argmax(rank, 0)
        own = tl.where(slot == place, best, own)
        weight = tl.where(slot == place, tl.sum(tl.where(at == best, score, 0.0), 0), weight)
        rank = tl.where(at == best, float("-inf"), rank)
    if NORMALISED:
        weight = weight / tl.maximum(tl.sum(weight, 0), least_sum)
    tl.store(chosen + token * TOP_K + slot, own, mask=slot < TOP_K)
    if LOAD:
        tl.atomic_add(load + own, tl.full([SLOTS], 1, tl.int64), mask=slot < TOP_K)
    tl.store(weights + token * TOP_K + slot, weight * scale, mask=slot < TOP_K)
