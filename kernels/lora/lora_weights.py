"""The adapters of one linear layer (LoRA, https://arxiv.org/abs/2106.09685): two low-rank matrices for each slot."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.lora.segments import BLOCK_COLUMNS, Segments


class ColumnPart(NamedTuple):
    """Outputs `columns` of a fused layer that belong to its part number `part`, such as the keys of `qkv`. Each part
    has low-rank matrices of its own, as checkpoints' layers are not fused."""

    part: int
    columns: range


class LoraWeights:
    """Low-rank matrices A and B of one layer in all slots. A token with slot s gets `B[s] @ A[s] @ x` added, part by
    part.

    | attribute | shape | meaning |
    | --- | --- | --- |
    | `a` | `[slots, parts * rank, in]` | A of all parts, one after the other |
    | `b` | `[slots, out, rank]` | B of all parts, with the scale |
    | `used` | int32 `[slots]` | whether the slot's adapter changes this layer; a view of a tensor of all layers |

    `rank` is the largest that an adapter may have. Rows and columns beyond an adapter's own are zeros.
    """

    def __init__(
        self,
        parts: Sequence[ColumnPart],
        num_slots: int,
        rank: int,
        in_size: int,
        out_size: int,
        dtype: torch.dtype,
        used: torch.Tensor,
    ) -> None:
        self.parts, self.rank, self.used = list(parts), rank, used
        self.num_parts = 1 + max((part.part for part in parts), default=0)
        self.a = torch.zeros(num_slots, self.num_parts * rank, in_size, dtype=dtype, device=used.device)
        self.b = torch.zeros(num_slots, out_size, rank, dtype=dtype, device=used.device)
        self._is_used = [False] * num_slots  # `used`, for the host
        blocks = [
            (part, first, min(first + BLOCK_COLUMNS, columns.stop))
            for part, columns in self.parts
            for first in range(columns.start, columns.stop, BLOCK_COLUMNS)
        ]
        # Columns are told in units, so that the kernel knows that it may read several at once.
        self.column_unit = math.gcd(BLOCK_COLUMNS, *(end for _, *ends in blocks for end in ends))
        # Whether every column belongs to a part.
        self.is_complete = sum(len(part.columns) for part in self.parts) == out_size
        table = np.array(blocks, dtype=np.int32).reshape(-1, 3)
        table[:, 1:] //= self.column_unit
        self.blocks = torch.from_numpy(table).to(used.device)  # part, first column, end

    def write(self, slot: int, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        """Puts an adapter into a slot: a `[parts, r, in]` and b `[out, r]`, with r up to `rank`; None for an adapter
        that does not change this layer. On a GPU the copies from pinned memory are launched, and not waited for. The
        caller sets `used`."""
        self._is_used[slot] = a is not None
        if a is None or b is None:
            return
        own, rank = a.shape[1], self.rank
        rows = self.a[slot].unflatten(0, (self.num_parts, rank))
        rows[:, :own].copy_(a, non_blocking=True)
        self.b[slot, :, :own].copy_(b, non_blocking=True)
        if own < rank:
            rows[:, own:].zero_()
            self.b[slot, :, own:].zero_()

    def add(self, x: torch.Tensor, y: torch.Tensor, segments: Segments, replaces: bool = False) -> None:
        """Adds each token's adapter's product of x `[n, in]` to y `[n, out]`, whose columns are contiguous. `segments`
        has taken the same n tokens. With `replaces`, on a GPU only and only if the layer `is_complete`, the products
        replace y, and zeros do where a token has none."""
        if x.is_cuda:
            from kernels.lora.segmented_kernels import add_segmented

            add_segmented(self, x, y, segments, replaces)
            return
        assert not replaces
        for slot, tokens in segments.groups:
            if self._is_used[slot]:
                self._add_group(x, y, slot, tokens)

    def _add_group(self, x: torch.Tensor, y: torch.Tensor, slot: int, tokens: torch.Tensor) -> None:
        """`add` for the tokens of one slot, by index. The reference of the kernels, and the way on a CPU."""
        is_all = len(tokens) == len(x)
        low = (x if is_all else x[tokens]) @ self.a[slot].t()
        for part, columns in self.parts:
            own = low[:, part * self.rank : (part + 1) * self.rank]
            product = own @ self.b[slot, columns.start : columns.stop].t()
            target = y[:, columns.start : columns.stop]
            if is_all:
                target += product
            else:
                target.index_add_(0, tokens, product)
