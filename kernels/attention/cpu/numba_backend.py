"""Attention on a CPU. Short chunks read the pages in place with a compiled kernel; long ones run as matrix products.

The kernel reads a page once. `TorchAttention` copies the pages of all contexts before it multiplies them, for every
layer of every step. CPU time of a whole decode step with `TorchAttention`, divided by that with the kernel, on one
thread with AVX-512:

| model, dtype | batch | context 128 | 1,024 | 4,096 |
| --- | --- | --- | --- | --- |
| SmolLM2-135M, float32 | 1 | 1.09 | 1.09 | 1.34 |
| SmolLM2-135M, float32 | 8 | 1.05 | 1.46 | 5.2 |
| SmolLM2-135M, bfloat16 | 1 | | 1.86 | 3.15 |
| SmolLM2-135M, bfloat16 | 8 | | 4.5 | |
| `tiny` of `bench.replica.dummy_models`, float32 | 8 | 1.11 | 1.41 | 2.13 |
| `tiny`, float32 | 32 | 1.13 | 1.72 | |

The gain grows with the contexts and with the batch; at 128 tokens it is small.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels import openmp
from kernels.attention.cpu import decode_kernel
from kernels.attention.cpu.decode_kernel import attend_bfloat16, attend_float32
from kernels.attention.interface import AttentionBatch, AttentionShape
from kernels.attention.torch_backend import TorchAttention

# The compiled kernel, which computes one query at a time, gets chunks of up to SHORT tokens, and longer ones for as
# long as (tokens - SHORT) * context, its own tokens included, is at most SHORT_AREA. Beyond that, the matrix products
# of PyTorch's attention gain more than its calls and the gathering of pages cost. On two threads with AVX-512, in
# float32, with 9 heads of which 3 KV heads, both take the same time at 40 tokens after 100, 20 after 250, 8 after 1,000
# and 7 after 4,000; with 32 heads of which 8, at over 64, 13, 7 and 8.
SHORT, SHORT_AREA = 5, 3_500

_KERNELS = {torch.float32: attend_float32, torch.bfloat16: attend_bfloat16}


@dataclass(frozen=True)
class _Seen:
    """The tokens that each query sees with one window: `counts[i]` tokens from `firsts[i]` on; int32 `[queries]`."""

    firsts: np.ndarray
    counts: np.ndarray


class NumbaAttention(TorchAttention):
    """Attention over the pages `kv` (see `kernels.attention.interface`), float32 or bfloat16, on a CPU."""

    def __init__(self, kv: torch.Tensor, shape: AttentionShape, sinks: torch.Tensor | None = None) -> None:
        super().__init__(kv, shape, sinks)
        self._kernel = _KERNELS[kv.dtype]
        self._factors = np.array([shape.scale, shape.softcap or 0.0], dtype=np.float32)

    def _plan_chunks(self, batch: AttentionBatch) -> None:
        lengths = batch.lengths.astype(np.int64)
        is_short = (lengths - SHORT) * (batch.starts + lengths) <= SHORT_AREA
        self._groups = [self._group(batch, np.array([c])) for c in np.flatnonzero(~is_short)]
        short = np.flatnonzero(is_short)
        lengths, contexts = batch.lengths[short], batch.starts[short] + batch.lengths[short]
        ends = np.cumsum(contexts)
        # Kernels get the contexts of all short chunks in one list, and for each query where its tokens stand there.
        positions = np.arange(contexts.sum()) - np.repeat(ends - contexts, contexts)
        self._tokens = self._rows(batch, np.repeat(short, contexts), positions).astype(np.int32)
        nth = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self._places = (np.repeat(batch.firsts[short], lengths) + nth).astype(np.int32)
        counts = np.repeat(batch.starts[short], lengths) + nth + 1
        last = np.repeat(ends - contexts, lengths) + counts
        self._seen = {}
        for window in set(self.shape.windows):
            limited = counts if window is None else np.minimum(counts, window)
            self._seen[window] = _Seen((last - limited).astype(np.int32), limited.astype(np.int32))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=torch.float32)
        for group in self._groups:
            self._attend_group(layer, group, q, out)
        if len(self._places):
            self._attend_rows(layer, q.float(), out)
        return out.to(q.dtype)

    def _attend_rows(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = self.flat[layer]
        seen = self._seen[self.shape.windows[layer]]
        arguments = np.zeros(decode_kernel.NUM_ARGUMENTS, dtype=np.int64)
        arguments[: decode_kernel.Q] = (
            0,
            len(self._places),
            self.shape.num_kv_heads,
            self.shape.num_heads // self.shape.num_kv_heads,
            self.shape.head_dim,
            self.page_size,
            q.stride(0),
            len(keys),
            len(self._tokens),
            len(q),
        )
        arguments[decode_kernel.Q : decode_kernel.TOKENS] = [t.data_ptr() for t in (q, out, keys, values)]
        arrays = (self._tokens, self._places, seen.firsts, seen.counts, self._factors)
        arguments[decode_kernel.TOKENS : decode_kernel.SINKS] = [a.ctypes.data for a in arrays]
        if self.sinks is not None:
            arguments[decode_kernel.SINKS] = self.sinks[layer].data_ptr()
        openmp.run(self._kernel, arguments)
