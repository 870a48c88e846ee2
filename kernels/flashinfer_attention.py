"""Attention with FlashInfer's kernels, on GPUs: tensor cores for single tokens too, FlashAttention 3 for longer chunks.
What sequences of single tokens share is read once for all of them (`kernels.shared_attention`), the rest by FlashInfer.

The kernels are called as FlashInfer's wrappers call them, without the wrappers: those keep buffers of their own for
every batch size, and wait for some of their copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.attention import (
    AttentionBatch,
    AttentionShape,
    GraphAttention,
    SharedPrefixes,
    flat_pages,
    token_positions,
    token_rows,
)
from kernels.prefixes import PrefixFinder
from kernels.transfer import StaticArrays, all_to_device, to_device

# Bytes of what the planners write for a step: some arrays of 4 bytes a tile of queries and a head.
_PLAN_BYTES = 8 << 20
# Bytes at least of what parts of a split context leave to be merged.
_PARTIAL_BYTES = 128 << 20
# Steps whose plans may be on their way to the device at once.
_PLANS_IN_FLIGHT = 3
# Rows of queries (times heads a KV head) in the smallest tile, for chunks of one token.
_SMALLEST_TILE = 16

_HND, _FULL, _CAUSAL = 1, 0, 1


class _Workspace:
    """Where a planner leaves its plan: a buffer on the device and, since the copy to it is not waited for, several on
    the host in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device_bytes = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._host = [torch.empty(_PLAN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_PLANS_IN_FLIGHT)]
        self._copied = [torch.cuda.Event() for _ in self._host]
        self._turn = 0

    def plan(self, planner: Callable[..., Any], partial: torch.Tensor, *arguments: Any) -> Any:
        self._turn = (self._turn + 1) % _PLANS_IN_FLIGHT
        self._copied[self._turn].synchronize()
        plan = planner(partial, self.device_bytes, self._host[self._turn], *arguments)
        self._copied[self._turn].record()
        return plan


@dataclass(frozen=True)
class _Part:
    """Consecutive chunks that one kernel attends for: tokens `first` to `last`. The arrays are on the device; `plan` is
    the planner's. The sequences of the first part may share prefixes, which another kernel attends to."""

    module: Any
    workspace: _Workspace
    plan: Any
    first: int
    last: int
    mask: int
    is_shared: bool
    graph_size: int | None
    query_ends: torch.Tensor
    page_ends: torch.Tensor
    last_page_tokens: torch.Tensor
    pages: torch.Tensor


def can_run(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether FlashInfer is there and has such a kernel."""
    try:
        import flashinfer.prefill  # noqa: F401
    except ImportError:
        return False
    plain = shape.softcap is None and all(window is None for window in shape.windows)
    return plain and dtype in (torch.bfloat16, torch.float16) and shape.head_dim in (64, 128, 256)


class FlashInferAttention(GraphAttention):
    """`kv` is the pages (see `kernels.attention`), on a GPU; the last page is nobody's. A graph holds up to `max_graph`
    sequences, whose tables have up to `max_pages` pages together. Raises ImportError without FlashInfer.
    """

    shares_prefixes = True

    def __init__(self, kv: torch.Tensor, shape: AttentionShape, max_graph: int, max_pages: int) -> None:
        from flashinfer.jit.attention import gen_batch_prefill_module
        from flashinfer.utils import is_sm90a_supported

        from kernels.shared_attention import SharedAttention, multiprocessors

        self.kv, self.shape = kv, shape
        self.page_size = kv.shape[4]
        self.device = kv.device
        # Types of q, kv, output and indices; head dimensions; no positions, windows or softcap; float32 accumulation.
        kernel = (kv.dtype, kv.dtype, kv.dtype, torch.int32, shape.head_dim, shape.head_dim, 0, False, False, False)
        self._single_module = gen_batch_prefill_module("fa2", *kernel).build_and_load()
        self._is_hopper = is_sm90a_supported(self.device)
        self._chunk_module = self._single_module
        if self._is_hopper:
            self._chunk_module = gen_batch_prefill_module("fa3", *kernel).build_and_load()
        # What the kernels take last: no masks, slopes, items, scales or softcap; no positions.
        self._fa2_arguments = (*(None,) * 8, 0.0, shape.scale, 1.0, 1.0, 0)
        self._fa3_arguments = (*(None,) * 4, 0.0, shape.scale, 1.0, 0)
        self._single_workspace, self._chunk_workspace = _Workspace(self.device), _Workspace(self.device)
        group = shape.num_heads // shape.num_kv_heads
        self._most_split = 2 * multiprocessors(self.device) // shape.num_kv_heads
        tiles = max(max_graph, self._most_split) + 1
        partials = shape.num_heads * -(-tiles * _SMALLEST_TILE // group) * (shape.head_dim + 1) * 4
        self._partial = torch.zeros(max(_PARTIAL_BYTES, partials + 4096), dtype=torch.uint8, device=self.device)
        self._host_range = torch.arange(max_graph + 1, dtype=torch.int32)
        self._device_range = self._host_range.to(self.device)
        self._static = StaticArrays(
            self.device,
            {
                "rows": (torch.int64, max_graph),
                "page_ends": (torch.int32, max_graph + 1),
                "last_page_tokens": (torch.int32, max_graph),
                "pages": (torch.int32, max_pages + max_graph),
            },
        )
        self._parts: list[_Part] = []
        self._finder = PrefixFinder(self.page_size, shape, kv.dtype.itemsize)
        self._shared = SharedAttention(self.device, kv.dtype, shape, max_graph, max_pages)
        most_parts = self._shared.most_parts, shape.num_heads
        self._part_out = torch.empty(*most_parts, shape.head_dim, dtype=torch.float32, device=self.device)
        self._part_lse = torch.empty(*most_parts, dtype=torch.float32, device=self.device)

    def shared_prefixes(self, batch: AttentionBatch) -> SharedPrefixes | None:
        return self._finder.find(batch)

    def plan(self, batch: AttentionBatch) -> None:
        chunk_of_token = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        rows = token_rows(batch, chunk_of_token, token_positions(batch), self.shape.num_kv_heads, self.page_size)
        self.rows = to_device(rows, self.device)
        singles = int((batch.lengths == 1).sum())
        if not (batch.lengths[:singles] == 1).all():
            raise ValueError("chunks of one token must come first")
        shared = self._shared_singles(batch, singles) if singles > 1 else None
        contexts, counts, skipped = self._contexts(batch, shared)
        parts = [part for part in ((0, singles), (singles, len(counts))) if part[0] < part[1]]
        arrays = []
        for first, last in parts:
            arrays += [
                _ends(batch.lengths[first:last]),
                _ends(counts[first:last]),
                contexts[first:last] - (counts[first:last] - 1) * self.page_size,
                flat_pages(batch, skipped, counts, slice(first, last)),
            ]
        tensors = all_to_device(arrays, self.device)
        self._parts, token = [], 0
        for index, (first, last) in enumerate(parts):
            of_part, end = slice(4 * index, 4 * index + 4), token + int(batch.lengths[first:last].sum())
            self._parts.append(
                self._planned(
                    arrays[of_part],
                    tensors[of_part],
                    contexts[first:last],
                    token,
                    end,
                    is_shared=index == 0 and shared is not None,
                )
            )
            token = end

    def plan_graph(self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None) -> None:
        padding = size - len(batch.lengths)
        contexts, counts, skipped = self._contexts(batch, shared)
        if shared is not None:
            self._shared.plan(batch, shared, self.page_size)
        scratch = self.kv.shape[2] - 1
        chunks = np.arange(len(counts))
        arrays = {
            "rows": token_rows(batch, chunks, batch.starts, self.shape.num_kv_heads, self.page_size),
            "page_ends": _ends(counts),
            "last_page_tokens": contexts - (counts - 1) * self.page_size,
            "pages": flat_pages(batch, skipped, counts),
        }
        if padding:
            row, end = scratch * self.shape.num_kv_heads * self.page_size, arrays["page_ends"][-1]
            more = np.arange(end + 1, end + padding + 1, dtype=np.int32)
            for name, value in (("rows", row), ("page_ends", more), ("last_page_tokens", 1), ("pages", scratch)):
                arrays[name] = _padded(arrays[name], padding, value)
            contexts = _padded(contexts, padding, 1)
        static = self._static
        static.fill(arrays)
        self.rows = static["rows"][:size]
        host = [self._host_range[: size + 1].numpy(), arrays["page_ends"]]
        device = [
            self._device_range[: size + 1],
            static["page_ends"][: size + 1],
            static["last_page_tokens"][:size],
            static["pages"],
        ]
        self._parts = [self._planned(host, device, contexts, 0, size, is_shared=shared is not None, graph_size=size)]

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        keys, values = self.kv[layer]
        for part in self._parts:
            part_q, part_out, lse = q[part.first : part.last], out[part.first : part.last], None
            if part.is_shared:
                lse = torch.empty(part_q.shape[:2], dtype=torch.float32, device=self.device)
            part.module.paged_run(
                self._partial,
                part.workspace.device_bytes,
                part.plan,
                part_q,
                keys,
                values,
                part.query_ends,
                part.page_ends,
                part.pages,
                part.last_page_tokens,
                part_out,
                lse,
                part.mask,
                _HND,
                -1,  # no window
                True,  # may start while the kernel before it ends
                *(self._fa3_arguments if self._is_hopper and part.mask == _CAUSAL else self._fa2_arguments),
            )
            if lse is not None:
                from kernels.range_attention import merge

                parts = self._shared.parts(self._part_out, self._part_lse)
                self._shared.attend(part_q, self.kv[layer], part_out, parts, part.graph_size)
                merge(part_out, parts, lse)
        return out

    def _planned(
        self,
        host: list[np.ndarray],
        device: list[torch.Tensor],
        contexts: np.ndarray,
        first: int,
        last: int,
        *,
        is_shared: bool,
        graph_size: int | None = None,
    ) -> _Part:
        """`host` begins with the ends of the chunks' queries and of their pages; `device` is `_Part`'s arrays."""
        graph = graph_size is not None
        num_chunks = len(contexts)
        is_single = last - first == num_chunks
        fa3 = self._is_hopper and not is_single
        module = self._single_module if is_single else self._chunk_module
        workspace = self._single_workspace if is_single else self._chunk_workspace
        shape = self.shape
        arguments = [
            torch.from_numpy(host[0]),
            torch.from_numpy(host[1]),
            torch.from_numpy(contexts.astype(np.int32)),
            last - first,
            num_chunks,
            shape.num_heads,
            shape.num_kv_heads,
            self.page_size,
            graph,
            shape.head_dim,
            shape.head_dim,
            not is_single,  # causal
            -1,  # no window
        ]
        if not fa3:
            # A graph merges parts of contexts even where none is split: none is where the sequences fill the GPU alone.
            whole = graph and num_chunks >= self._most_split
            arguments += [-1, whole, 0, 1 if graph else 0]
        plan = workspace.plan(module.plan, self._partial, *arguments)
        mask = _FULL if is_single else _CAUSAL
        return _Part(module, workspace, plan, first, last, mask, is_shared, graph_size, *device)

    def _shared_singles(self, batch: AttentionBatch, singles: int) -> SharedPrefixes | None:
        """Prepares for what the first `singles` chunks, those of one token, had better read together."""
        decodes = AttentionBatch(batch.tables, batch.rows[:singles], batch.starts[:singles], batch.lengths[:singles])
        shared = self._finder.find(decodes)
        if shared is not None:
            self._shared.plan(decodes, shared, self.page_size)
        return shared

    def _contexts(
        self, batch: AttentionBatch, shared: SharedPrefixes | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | int]:
        """Tokens and pages that each chunk sees by itself, its own included, and the pages before those: int32."""
        contexts = batch.starts + batch.lengths
        if shared is None:
            return contexts, -(-contexts // self.page_size), 0
        skipped = shared.pages_of(len(contexts))
        contexts = contexts - skipped * self.page_size
        return contexts, -(-contexts // self.page_size), skipped


def _ends(lengths: np.ndarray) -> np.ndarray:
    """0 and where each of these ends, one after the other: int32."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends


def _padded(array: np.ndarray, padding: int, value: int | np.ndarray) -> np.ndarray:
    return np.concatenate((array, np.broadcast_to(np.asarray(value, dtype=array.dtype), padding)))
