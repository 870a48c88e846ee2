"""The (token, expert) pairs of a step, in the order in which grouped products take them."""

from typing import NamedTuple

import torch


class PairBlocks(NamedTuple):
    """Pairs sorted by expert, and cut into blocks of one expert each.

    | field | shape | meaning |
    | --- | --- | --- |
    | `pairs` | int32 `[n * top_k]` | pairs in the order of their experts, without those elsewhere |
    | `expert` | int32 `[most blocks]` | expert of each block, -1 for none |
    | `first`, `rows` | int32 `[most blocks]` | the block's part of `pairs` |
    """

    pairs: torch.Tensor
    expert: torch.Tensor
    first: torch.Tensor
    rows: torch.Tensor
