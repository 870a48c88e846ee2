"""The recurrence of Mamba2 (https://arxiv.org/abs/2405.21060) in plain PyTorch and float32: token by token, and in
blocks.

For each head, with a state S `[value_dim, key_dim]`, a step size d > 0 and a decay a = exp(log_decay) of each token:

    S = a S + d x b^T        out = S c + skip x

The keys b and the queries c of a group belong to all of its heads. So products with them are matrix products over all
heads of a group at once.

In blocks, a token sees the state before the block through the product of the decays up to it, and the tokens before it
in the block through a matrix of products and decays, as in attention without a softmax.
"""

import torch
import torch.nn.functional as F

from kernels.recurrent.recurrence import BLOCK


def ssd_step(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    step: torch.Tensor,
    log_decay: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Computes one token of each of n sequences, and updates their states in place.

    x: `[n, heads, value_dim]`. b, c: `[n, groups, key_dim]`. step, log_decay: `[n, heads]`. skip: `[heads]`. state:
    `[n, heads, value_dim, key_dim]`. All float32. Returns `[n, heads, value_dim]`.
    """
    n, groups, _ = b.shape
    state.mul_(log_decay.exp()[..., None, None])
    of_groups = state.view(n, groups, -1, state.shape[-1])
    of_groups.addcmul_((x * step[..., None]).view(n, groups, -1, 1), b[:, :, None, :])
    return (of_groups @ c[..., None]).view(x.shape).addcmul_(x, skip[:, None])


def ssd_blocks(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    step: torch.Tensor,
    log_decay: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Computes all tokens of one sequence in blocks, and updates its state in place.

    Arguments are those of `ssd_step`, n being the tokens of the sequence, and state `[heads, value_dim, key_dim]`.
    Returns `[n, heads, value_dim]`.
    """
    (n, groups, _), size = b.shape, min(BLOCK, len(b))
    padding = -n % size
    # Tokens of padding change nothing: their inputs are zero, and their decays one.
    values = F.pad(x * step[..., None], (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, size))
    b, c = (F.pad(each, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, size)).permute(2, 0, 1, 3) for each in (b, c))
    total = F.pad(log_decay, (0, 0, 0, padding)).unflatten(0, (-1, size)).cumsum(1)  # [blocks, size, heads]
    of_heads = total.permute(2, 0, 1)
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    between = (of_heads[..., :, None] - of_heads[..., None, :]).masked_fill_(later, float("-inf")).exp_()
    # [groups, heads of a group, blocks, size, size]
    inside = between.unflatten(0, (groups, -1)).mul_((c @ b.mT)[:, None]).flatten(0, 1)
    out = (inside @ values.permute(2, 0, 1, 3)).permute(1, 2, 0, 3).contiguous()  # [blocks, size, heads, value_dim]
    decayed = total.exp()[..., None]
    late = values * (total[:, -1:] - total).exp_()[..., None]
    of_groups = state.view(groups, -1, state.shape[-1])
    for block in range(len(out)):
        seen = c[:, block] @ of_groups.mT  # [groups, size, heads of a group * value_dim]
        out[block].addcmul_(seen.transpose(0, 1).reshape(out[block].shape), decayed[block])
        state.mul_(decayed[block, -1, :, :, None])
        of_groups.baddbmm_(late[block].reshape(size, groups, -1).permute(1, 2, 0), b[:, block])
    return out.flatten(0, 1)[:n].addcmul_(x, skip[:, None])
