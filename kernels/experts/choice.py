"""Choice of the experts of each token, and of the weights of their outputs."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Routing:
    """How a layer's router chooses experts. `choose` is the definition.

    | field | meaning |
    | --- | --- |
    | `top_k` | number of experts of a token |
    | `scores` | how logits become scores. `sparsemixer`: one expert after the other, see `_sparse_mixer` |
    | `jitter` | of `sparsemixer`: half the distance from the largest logit, as a part of it, up to which others count |
    | `is_normalised` | the scores of a token's experts are divided by their sum |
    | `scale` | factor of all weights, applied last |
    | `groups`, `groups_kept` | experts are in `groups` equal groups; a token's are in `groups_kept` of them |
    | `group_top` | number of a group's largest scores whose sum is the group's score |
    | `added_to_sum` | added to the divisor of the normalisation |

    A softmax over the logits of the chosen experts alone, as some models have, is a softmax over all logits whose
    chosen scores are normalised.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    added_to_sum: float = 0.0
    group_top: int = 2
    jitter: float = 0.0


def choose(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.experts.routing.route` by PyTorch's operators: its definition."""
    if routing.scores == "sparsemixer":
        return _sparse_mixer(logits, routing)
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
    ranks = scores if bias is None else scores + bias
    if routing.groups > 1:
        by_group = ranks.unflatten(1, (routing.groups, -1))
        kept = by_group.topk(routing.group_top)[0].sum(-1).topk(routing.groups_kept)[1]
        left_out = torch.ones(len(ranks), routing.groups, dtype=torch.bool, device=ranks.device).scatter_(
            1, kept, False
        )
        ranks = by_group.masked_fill(left_out[:, :, None], float("-inf")).flatten(1)
    chosen = ranks.topk(routing.top_k)[1]
    weights = scores.gather(1, chosen)
    if routing.is_normalised:
        weights = weights / weights.sum(-1, keepdim=True).add_(routing.added_to_sum)
    return chosen.int(), weights * routing.scale


def _sparse_mixer(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """SparseMixer-v2 without its noise (https://arxiv.org/abs/2409.12136): each expert is the one with the largest
    logit that is left. Its weight is its share of a softmax over those left whose logits are near, by `jitter`."""
    left, chosen, weights = logits, [], []
    for _ in range(routing.top_k):
        most, index = left.max(-1, keepdim=True)
        is_far = (most - logits) / torch.maximum(logits.abs(), most) > 2 * routing.jitter
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, index))
        chosen.append(index)
        left = left.scatter(1, index, float("-inf"))
    return torch.cat(chosen, 1).int(), torch.cat(weights, 1)


def with_always(
    chosen: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, always: int, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice with the `always` experts that every token has, as `kernels.experts.routing.route` says."""
    if not always:
        return chosen, weights
    experts = logits.shape[1] - gated
    numbers = torch.arange(experts, experts + always, dtype=torch.int32, device=chosen.device)
    share = logits[:, experts:].sigmoid() if gated else torch.ones_like(logits[:, :1])
    n = len(logits)
    return torch.cat((chosen, numbers.expand(n, -1)), 1), torch.cat((weights, share.expand(n, always)), 1)


def count_tokens(chosen: torch.Tensor, load: torch.Tensor) -> None:
    """Adds the number of tokens of each expert to `load`, int64 `[experts]`. chosen: int32, of any shape."""
    experts = chosen.flatten()
    load.index_add_(0, experts, torch.ones_like(experts, dtype=load.dtype))
