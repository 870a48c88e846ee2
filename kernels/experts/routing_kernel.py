"""`kernels.experts.routing.route` as a Triton kernel: one program a token.

Imported only where there is a GPU (or Triton's interpreter).
"""

import torch
import triton
import triton.language as tl

from kernels import pdl
from kernels.experts.choice import Routing, choose, count_tokens, with_always
from kernels.pdl import launch_dependents, wait_for_previous


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    always: int = 0,
    gated: bool = False,
    load: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.experts.routing.route` for contiguous logits. Experts in groups are chosen by PyTorch's operators."""
    if routing.groups > 1:
        found = choose(logits[:, : logits.shape[1] - gated], routing, bias)
        if load is not None:
            count_tokens(found[0], load)
        return with_always(*found, logits, always, gated)
    n, columns = logits.shape
    experts = columns - gated
    chosen = torch.empty(n, routing.top_k + always, dtype=torch.int32, device=logits.device)
    weights = torch.empty(n, routing.top_k + always, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(experts)
    _route[(n,)](
        logits,
        logits if bias is None else bias,
        logits if load is None else load,
        chosen,
        weights,
        experts,
        columns,
        routing.scale,
        routing.added_to_sum,
        routing.scores == "sigmoid",
        bias is not None,
        load is not None,
        routing.is_normalised,
        routing.top_k,
        always,
        gated,
        triton.next_power_of_2(routing.top_k + always),
        block,
        num_warps=1 if block <= 512 else 4,
        **pdl.OPTIONS,
    )
    return chosen, weights


@triton.jit
def _score(logit, largest, divisor, SIGMOID: tl.constexpr):
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        score = tl.exp(logit - largest) / divisor
    return score


@triton.jit
def _route(
    logits,
    bias,
    load,
    chosen,
    weights,
    experts,
    columns,
    scale,
    added_to_sum,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    LOAD: tl.constexpr,
    NORMALISED: tl.constexpr,
    TOP_K: tl.constexpr,
    ALWAYS: tl.constexpr,
    GATED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < experts
    wait_for_previous()
    own_logits = logits + token * columns
    logit = tl.load(own_logits + at, mask=inside, other=float("-inf"))
    largest = tl.max(logit, 0)
    divisor = tl.sum(tl.exp(logit - largest), 0)
    rank = _score(logit, largest, divisor, SIGMOID)
    if BIAS:
        rank += tl.load(bias + at, mask=inside, other=0.0)
    # Ranks as integers of the same order, each with its expert in the lower half: one reduction finds the best expert,
    # of equal ones the first. Looking for value and place apart took twice as long.
    bits = tl.where(inside, rank, float("-inf")).to(tl.int32, bitcast=True)
    bits = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (BLOCK - 1 - at).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    own = tl.zeros([SLOTS], dtype=tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        own = tl.where(slot == place, BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32), own)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
    is_chosen = slot < TOP_K
    weight = _score(tl.load(own_logits + own, mask=is_chosen, other=float("-inf")), largest, divisor, SIGMOID)
    weight = tl.where(is_chosen, weight, 0.0)
    if NORMALISED:
        weight = weight / (tl.sum(weight, 0) + added_to_sum)
    if LOAD:
        tl.atomic_add(load + own, tl.full([SLOTS], 1, tl.int64), mask=is_chosen)
    weight *= scale
    if ALWAYS > 0:
        share = 1.0
        if GATED:
            share = tl.sigmoid(tl.load(logits + token * columns + experts))
        own = tl.where(slot < TOP_K, own, experts + slot - TOP_K)
        weight = tl.where(slot < TOP_K, weight, share)
    tl.store(chosen + token * (TOP_K + ALWAYS) + slot, own, mask=slot < TOP_K + ALWAYS)
    tl.store(weights + token * (TOP_K + ALWAYS) + slot, weight, mask=slot < TOP_K + ALWAYS)
