"""Routing: the experts of each token on any device."""

import torch

from kernels.experts.choice import Routing, choose, count_tokens, with_always


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    always: int = 0,
    gated: bool = False,
    load: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the experts of each token, int32 `[n, top_k]`, and their weights, float32 `[n, top_k]`, in any order.

    After them come the `always` experts that every token has, numbered after the others: `[n, top_k + always]` then.
    Their weight is 1, or, if `gated`, the sigmoid of a further logit.

    logits: float32 `[n, experts]`. bias: float32 `[experts]`, added to scores for the choice of experts, and not for
    their weights (https://arxiv.org/abs/2408.15664). A group's score is the sum of its two largest scores
    (https://arxiv.org/abs/2412.19437, section 2.1.2), or the largest (https://arxiv.org/abs/2405.04434, section 2.2.2).
    load: int64 `[experts]`, to which the number of tokens of each expert is added.
    """
    if logits.is_cuda and routing.scores != "sparsemixer":
        from kernels.experts import routing_kernel

        return routing_kernel.route(logits, routing, bias, always, gated, load)
    chosen, weights = choose(logits[:, : logits.shape[1] - gated], routing, bias)
    if load is not None:
        count_tokens(chosen, load)
    return with_always(chosen, weights, logits, always, gated)
