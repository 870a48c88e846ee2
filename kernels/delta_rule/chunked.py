"""The gated delta rule (https://arxiv.org/abs/2412.06464) in plain PyTorch and float32: token by token, and in blocks.

For each head, with a state S `[value_dim, key_dim]`, a decay a = exp(log_decay) and a strength b = beta of each token:

    S = a S + b (v - a S k) k^T        out = S q

Keys and queries have length one, and queries are divided by sqrt(key_dim).

In blocks, the products of the decays up to each token of a block are D (`decayed`). All corrections of a block
u_t = b_t (v_t - a_t S_(t-1) k_t) follow from the state before it by one triangular system. So a block takes a few
matrix products in place of a loop over its tokens.
"""

import torch
import torch.nn.functional as F

from kernels.recurrent.recurrence import BLOCK

_LEAST_LENGTH = 1e-6  # added to the squared length of keys and queries


def unit_heads(q: torch.Tensor, k: torch.Tensor, value_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, `[n, key_heads, key_dim]`, as the rule takes them: float32 `[n, value_heads, key_dim]`."""
    times = value_heads // q.shape[1]
    q, k = (_unit(x.float()).repeat_interleave(times, dim=1) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _LEAST_LENGTH).rsqrt()


def delta_rule_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Computes one token of each of n sequences, and updates their states in place.

    q, k: `[n, heads, key_dim]`, of `unit_heads`. v: `[n, heads, value_dim]`. log_decay, beta: `[n, heads]`. state: `[n,
    heads, value_dim, key_dim]`. All float32. Returns `[n, heads, value_dim]`.
    """
    state.mul_(log_decay.exp()[..., None, None])
    correction = (v - (state @ k[..., None])[..., 0]) * beta[..., None]
    state.addcmul_(correction[..., None], k[..., None, :])
    return (state @ q[..., None])[..., 0]


def delta_rule_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Computes all tokens of one sequence in blocks, and updates its state in place.

    Arguments are those of `delta_rule_step`, n being the tokens of the sequence, and state `[heads, value_dim,
    key_dim]`. Returns `[n, heads, value_dim]`.
    """
    n, size = len(q), min(BLOCK, len(q))
    padding = -n % size
    # [heads, blocks, size, ...]. Tokens of padding change nothing: their keys and strengths are zero.
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, size)).permute(2, 0, 1, 3) for x in (q, k, v))
    log_decay, beta = (
        F.pad(x, (0, 0, 0, padding)).unflatten(0, (-1, size)).permute(2, 0, 1) for x in (log_decay, beta)
    )
    total = log_decay.cumsum(2)
    decayed = total.exp()[..., None]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill_(later, float("-inf")).exp_()
    scaled = k * beta[..., None]
    system = (scaled @ k.mT) * between
    # What the corrections would be without a state before the block, and how they depend on that state.
    alone, of_state = (
        torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        for right in (v * beta[..., None], scaled * decayed)
    )
    inside = (q @ k.mT) * between
    q, k = q * decayed, k * (total[..., -1:] - total).exp_()[..., None]
    left = decayed[..., -1, :, None]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for block in range(q.shape[1]):
        corrections = alone[:, block] - of_state[:, block] @ state.mT
        out[:, block] = q[:, block] @ state.mT + inside[:, block] @ corrections
        state.mul_(left[:, block]).add_(corrections.mT @ k[:, block])
    return out.flatten(1, 2)[:, :n].transpose(0, 1)
