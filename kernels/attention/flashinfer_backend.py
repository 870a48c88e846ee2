"""Attention on GPUs with the fastest kernel for each kind of chunk: FlashInfer's, or one of ours.

| chunks | kernel |
| --- | --- |
| longer than one token | FlashAttention 3 on Hopper, FlashInfer's FlashAttention 2 elsewhere |
| few single tokens, in plain graphs | `kernels.attention.split_kv_decode` |
| other single tokens | FlashInfer's FlashAttention 2, on tensor cores |
| many single tokens that share prefixes, or with few query heads a KV head | `kernels.attention.stream_k_decode` |
| few single tokens that share prefixes | `kernels.attention.triton_backend` |
| any, in graphs of chunks | `kernels.attention.triton_backend`; many single tokens as above |

The thresholds below have the measured gains.

FlashInfer's kernels are called as its wrappers call them, but without the wrappers: these keep separate buffers for
every batch size, and wait for some of their copies. Layers with a window have kernels and plans of their own. Sinks are
added to the kernels' outputs (`kernels.attention.sinks`).
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.attention.interface import (
    AttentionBatch,
    AttentionShape,
    GraphAttention,
    SharedPrefixes,
    flat_pages,
    slot_mapping,
    token_positions,
)
from kernels.host_device import GraphInputs, PinnedRing, all_to_device

if TYPE_CHECKING:  # modules that import Triton, which is installed only where there is a GPU
    from kernels.attention.split_kv_decode import SplitKVDecode
    from kernels.attention.stream_k_decode import StreamKAttention

# Bytes of a step's plan: FlashInfer's planners write some arrays of 4 bytes for each tile of queries and head.
_PLAN_BYTES = 8 << 20
# Least bytes for the parts of split contexts, which are merged.
_PARTIAL_BYTES = 128 << 20
# Rows of queries in FlashInfer's smallest tile, which chunks of one token use. A query has a row for each head that
# reads the KV head.
_SMALLEST_TILE = 16

# When `stream_k_decode` is faster: from `_STREAM_FROM` single tokens on and, if nothing is shared, with up to
# `_STREAM_GROUP` query heads a KV head, since the parts to be merged grow with these. Measured on an H200:
# - nothing shared, contexts of 100 to 2,000 tokens: it saves 3 to 7 us of 36 to 164 with 2 heads, 2 to 6 us with 4, and
#   nothing with 8;
# - shared prefixes: 235 us where split-KV ranges take 294, and 105 where they take 134.
_STREAM_FROM, _STREAM_GROUP = 16, 4

# Most single tokens of a plain graph, times KV heads, for which `split_kv_decode` attends: beyond, each of its programs
# has too many keys, and long contexts take longer than with FlashInfer. Tuned on an H200 for 32 query heads, 4 or 8 KV
# heads. One sequence of 300 to 8,000 tokens: it saves 4 to 5 us of a layer; of 32,000: 2 us with 4 KV heads, while
# with 8 it takes 4 us of 56 longer. Four with 4 KV heads: 4 us at 1,300 tokens, nothing at 8,000. Four with 8 KV heads
# would save 3 us at 1,300 and lose 25 of 41 at 8,000.
_SPLIT_UP_TO = 16

# Most operations of a step's attention to chunks for which a graph with our kernel is faster. Our kernel does 289
# TFLOP/s, FlashAttention 3 does 550: with more operations ours loses over 0.3 ms, which is more than starting the
# step's kernels one by one takes. (H200.)
_MOST_OPERATIONS = 1.8e11

_HND, FULL, CAUSAL = 1, 0, 1


class PlanWorkspace:
    """The buffers of one of FlashInfer's planners: one on the device, and several on the host, used in turn, since the
    host does not wait for the copy."""

    def __init__(self, device: torch.device) -> None:
        self.device_bytes = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._turns = PinnedRing(device, _PLAN_BYTES)

    def plan(self, planner: Callable[..., Any], partial: torch.Tensor, *arguments: Any) -> Any:
        turn = self._turns.next()
        plan = planner(partial, self.device_bytes, turn.bytes_, *arguments)
        turn.begun()
        return plan


@dataclass(frozen=True)
class _Part:
    """Consecutive chunks that one of FlashInfer's kernels computes: tokens `first` to `last` (exclusive) of the batch.
    `plan` is what the planner returned. `before`: the keys before its own that a query sees, -1 for all of them. The
    arrays are on the device."""

    module: Any
    workspace: PlanWorkspace
    plan: Any
    first: int
    last: int
    mask: int
    before: int
    query_ends: torch.Tensor
    page_ends: torch.Tensor
    last_page_tokens: torch.Tensor
    pages: torch.Tensor


def has_kernel(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether FlashInfer supports the model: 16-bit pages, head dimension 64, 128 or 256. `modules` says whether its
    kernels can be had on this machine."""
    return dtype in (torch.bfloat16, torch.float16) and shape.head_dim in (64, 128, 256)


@cache
def modules(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> dict[bool, tuple[Any, Any]]:
    """FlashInfer's kernels for single tokens and for longer chunks, by whether a layer has a window. They are compiled
    at their first use on a machine. Raises ImportError without FlashInfer, and OSError or RuntimeError if they cannot
    be compiled."""
    from flashinfer.jit.attention import gen_batch_prefill_module
    from flashinfer.utils import is_sm90a_supported

    find_ninja()
    made = {}
    for has_window in {window is not None for window in shape.windows}:
        # Types of q, kv, output and indices; head dimensions; no positions; windows and softcap; float32 accumulation.
        sizes = dtype, dtype, dtype, torch.int32, shape.head_dim, shape.head_dim
        kernel = (*sizes, 0, has_window, shape.softcap is not None, False)
        single = gen_batch_prefill_module("fa2", *kernel).build_and_load()
        on_hopper = is_sm90a_supported(device)
        made[has_window] = single, gen_batch_prefill_module("fa3", *kernel).build_and_load() if on_hopper else single
    return made


def find_ninja() -> None:
    """Puts the program ninja on the PATH, which FlashInfer calls. Its package installs it next to Python, which is not
    on the PATH if the environment was not activated."""
    if shutil.which("ninja") is None:
        os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{Path(sys.executable).parent}"


class FlashInferAttention(GraphAttention):
    """Attention over the pages `kv` (see `kernels.attention.interface`) on a GPU. No sequence uses the last page.

    A batch has at most `max_sequences` chunks of one token. A graph has up to `max_tokens` tokens, or up to
    `max_sequences` if it is for chunks of one token; its sequences have up to `max_pages` pages together. Raises what
    `modules` raises.
    """

    has_plain_graphs = True

    def __init__(
        self,
        kv: torch.Tensor,
        shape: AttentionShape,
        max_sequences: int,
        max_pages: int,
        max_tokens: int,
        sinks: torch.Tensor | None = None,
    ) -> None:
        from flashinfer.utils import is_sm90a_supported

        from kernels.attention import split_kv_decode, stream_k_decode
        from kernels.attention.sinks import add_sinks
        from kernels.attention.triton_backend import TritonAttention, multiprocessors

        super().__init__(kv, shape, sinks)
        self._modules = modules(shape, kv.dtype, self.device)
        self._windows = list(dict.fromkeys(shape.windows))
        self._is_hopper = is_sm90a_supported(self.device)
        # The kernels' last arguments: no masks, slopes, items or scales; softcap, 0 for none; no positions.
        self._fa2_arguments = (*(None,) * 8, shape.softcap or 0.0, shape.scale, 1.0, 1.0, 0)
        self._fa3_arguments = (*(None,) * 4, shape.softcap or 0.0, shape.scale, 1.0, 0)
        # By window, and whether the chunks are single tokens.
        self._workspaces = {
            (window, is_single): PlanWorkspace(self.device) for window in self._windows for is_single in (False, True)
        }
        group = shape.num_heads // shape.num_kv_heads
        self._most_split = 2 * multiprocessors(self.device) // shape.num_kv_heads
        tiles = max(max_sequences, self._most_split) + 1
        partials = shape.num_heads * -(-tiles * _SMALLEST_TILE // group) * (shape.head_dim + 1) * 4
        self._partial = torch.zeros(max(_PARTIAL_BYTES, partials + 4096), dtype=torch.uint8, device=self.device)
        self._host_range = torch.arange(max_sequences + 1, dtype=torch.int32)
        self._device_range = self._host_range.to(self.device)
        self._static = GraphInputs(
            self.device,
            {
                "rows": (torch.int64, max_sequences),
                "page_ends": (torch.int32, max_sequences + 1),
                "last_page_tokens": (torch.int32, max_sequences),
                "pages": (torch.int32, max_pages + max_sequences),
            },
        )
        self._views: dict[int, tuple[torch.Tensor, np.ndarray, list[torch.Tensor]]] = {}  # of `_static`, by size
        self._parts: dict[int | None, list[_Part]] = {}  # by window
        self._add_sinks = add_sinks
        self._ranges = TritonAttention(kv, shape, max_sequences, max_pages, max_tokens, sinks)
        # Our own kernels for the planned batch, each with the number of tokens, from the first on, that it is given.
        self._ours: list[tuple[int, Callable[[int, torch.Tensor, torch.Tensor], None]]] = []
        self._stream: StreamKAttention | None = None
        if stream_k_decode.can_run(shape, kv.dtype):
            sizes = max_sequences, max_pages, multiprocessors(self.device)
            self._stream = stream_k_decode.StreamKAttention(kv, shape, *sizes)
        self._streams_plain = group <= _STREAM_GROUP
        self._few: SplitKVDecode | None = None
        self._few_tokens = _SPLIT_UP_TO // shape.num_kv_heads
        if self._few_tokens and split_kv_decode.can_run(shape, kv.dtype):
            sizes = min(max_sequences, self._few_tokens), max_pages, multiprocessors(self.device)
            self._few = split_kv_decode.SplitKVDecode(kv, shape, *sizes, sinks)

    def shared_prefixes(self, batch: AttentionBatch) -> SharedPrefixes | None:
        return self._ranges.shared_prefixes(batch)

    def fits_graph(self, batch: AttentionBatch) -> bool:
        shape = self.shape
        lengths = batch.lengths.astype(np.int64)
        seen = batch.starts + (lengths + 1) / 2  # keys of a token, on average
        pairs = 0.0
        for window in self._windows:
            in_window = seen if window is None else np.minimum(seen, window)
            pairs += shape.windows.count(window) * float((lengths * in_window)[lengths > 1].sum())
        return 4 * shape.num_heads * shape.head_dim * pairs <= _MOST_OPERATIONS

    def plan(self, batch: AttentionBatch) -> None:
        chunk_of_token = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        rows = slot_mapping(batch, chunk_of_token, token_positions(batch), self.shape.num_kv_heads, self.page_size)
        shared = self.shared_prefixes(batch)
        singles = batch.num_singles
        decodes = batch.part(0, singles)
        stream = self._stream_for(singles, shared)
        self._ours = []
        if stream is None and shared is not None:
            self._ranges.plan_shared(decodes, shared)
            self._ours = [(singles, self._ranges.attend_into)]
        contexts = batch.starts + batch.lengths
        counts = -(-contexts // self.page_size)
        ours = 0 if stream is None and shared is None else singles
        parts = [part for part in ((ours, singles), (singles, len(counts))) if part[0] < part[1]]
        arrays = [rows]
        for first, last in parts:
            arrays += [
                ends_of(batch.lengths[first:last]),
                ends_of(counts[first:last]),
                contexts[first:last] - (counts[first:last] - 1) * self.page_size,
                flat_pages(batch.tables, batch.rows[first:last], counts[first:last]),
            ]
        if stream is not None:
            arrays += stream.arrays(stream.work(decodes, shared))
        self.slots, *tensors = all_to_device(arrays, self.device)
        if stream is not None:
            self._ours = [(singles, partial(stream.attend_into, tensors[4 * len(parts) :]))]
        self._parts, token = {window: [] for window in self._windows}, ours
        for index, (first, last) in enumerate(parts):
            end = token + int(batch.lengths[first:last].sum())
            host, device = arrays[4 * index + 1 : 4 * index + 5], tensors[4 * index : 4 * index + 4]
            for window, planned in self._parts.items():
                planned.append(self._planned(window, host, device, contexts[first:last], token, end))
            token = end

    def plan_graph(
        self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None, *, chunks: bool = False
    ) -> None:
        own, num_kv_heads, scratch = len(batch.rows), self.shape.num_kv_heads, self.kv.shape[2] - 1
        self._parts = {}
        if chunks:
            self._plan_chunks(batch, size, shared)
            return
        stream = self._stream_for(size, shared)
        if stream is None and shared is not None:
            self._ranges.plan_graph(batch, size, shared)
            self.slots, self._ours = self._ranges.slots, [(size, self._ranges.attend_into)]
            return
        if stream is None and self._few is not None and size <= self._few_tokens:
            self._few.plan_graph(batch, size)
            self.slots, self._ours = self._few.slots, [(size, self._few.attend_into)]
            return
        rows = np.full(size, scratch * num_kv_heads * self.page_size)
        rows[:own] = slot_mapping(batch, np.arange(own), batch.starts, num_kv_heads, self.page_size)
        if stream is not None:
            self.slots, streamed = stream.fill(stream.work(batch, shared, size - own), rows)
            self._ours = [(size, partial(stream.attend_into, streamed))]
            return
        self._ours = []
        # The batch is padded with sequences of one token, in the last page.
        contexts = np.ones(size, dtype=np.int32)
        contexts[:own] = batch.starts + batch.lengths
        counts = -(-contexts // self.page_size)
        pages = flat_pages(batch.tables, batch.rows, counts[:own])
        arrays = {
            "rows": rows,
            "page_ends": ends_of(counts),
            "last_page_tokens": contexts - (counts - 1) * self.page_size,
            "pages": np.append(pages, np.full(size - own, scratch, dtype=np.int32)) if size > own else pages,
        }
        self._static.fill(arrays)
        self.slots, query_ends, device = self._views_of(size)
        host = [query_ends, arrays["page_ends"]]
        self._parts = {
            window: [self._planned(window, host, device, contexts, 0, size, graph=True)] for window in self._windows
        }

    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        for end, attend_into in self._ours:
            attend_into(layer, q[:end], out[:end])
        keys, values = self.kv[layer]
        for part in self._parts.get(self.shape.windows[layer], ()):
            own = out[part.first : part.last]
            # Logarithms to base 2 of the sums of weights.
            sums = None if self.sinks is None else own.new_empty(own.shape[:2], dtype=torch.float32)
            part.module.paged_run(
                self._partial,
                part.workspace.device_bytes,
                part.plan,
                q[part.first : part.last],
                keys,
                values,
                part.query_ends,
                part.page_ends,
                part.pages,
                part.last_page_tokens,
                own,
                sums,
                part.mask,
                _HND,
                part.before,
                True,  # may start while the kernel before it ends
                *(self._fa3_arguments if self._is_hopper and part.mask == CAUSAL else self._fa2_arguments),
            )
            if self.sinks is not None and sums is not None:
                self._add_sinks(own, sums, self.sinks[layer])

    def _views_of(self, size: int) -> tuple[torch.Tensor, np.ndarray, list[torch.Tensor]]:
        """For a graph of `size` tokens: `slots`, the ends of queries on the host, and the arrays of `_Part`. Made once,
        since that takes the host longer than filling them."""
        if size not in self._views:
            static, ends = self._static, slice(size + 1)
            device = [static["page_ends"][ends], static["last_page_tokens"][:size], static["pages"]]
            self._views[size] = (
                static["rows"][:size],
                self._host_range[ends].numpy(),
                [self._device_range[ends], *device],
            )
        return self._views[size]

    def _plan_chunks(self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None) -> None:
        """Plans a graph of chunks. Split-KV ranges attend for chunks, and a stream for the single tokens if these are
        many and share nothing. If the model can have streams, both kernels are in every such graph, even if one has
        nothing to do."""
        singles = batch.num_singles
        if self._stream is None or singles < _STREAM_FROM or (shared is not None and len(shared.members)):
            singles = 0
        self._ranges.plan_graph(batch, size, shared, chunks=True, first=singles)
        self.slots, self._ours = self._ranges.slots, [(size, self._ranges.attend_into)]
        if self._stream is not None:
            if singles:
                work = self._stream.work(batch.part(0, singles), None)
                _, arrays = self._stream.fill(work, np.empty(0, dtype=np.int64))
            else:
                arrays = self._stream.fill_empty()
            self._ours.append((size, partial(self._stream.attend_into, arrays)))

    def _stream_for(self, singles: int, shared: SharedPrefixes | None) -> "StreamKAttention | None":
        """The stream that attends for this number of single tokens; None if another kernel is faster."""
        is_faster = singles >= _STREAM_FROM and (shared is not None or self._streams_plain)
        return self._stream if is_faster else None

    def _planned(
        self,
        window: int | None,
        host: list[np.ndarray],
        device: list[torch.Tensor],
        contexts: np.ndarray,
        first: int,
        last: int,
        *,
        graph: bool = False,
    ) -> _Part:
        """Plans one of FlashInfer's kernels for consecutive chunks, in the layers of one window. `host` begins with the
        ends of the chunks' queries and of their pages; `device` is the arrays of `_Part`."""
        num_chunks = len(contexts)
        is_single = last - first == num_chunks
        fa3 = self._is_hopper and not is_single
        module = self._modules[window is not None][0 if is_single else 1]
        workspace = self._workspaces[window, is_single]
        before = -1 if window is None else window - 1
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
            before,
        ]
        if not fa3:
            # A graph merges parts even if no context is split. This many sequences fill the GPU without a split.
            whole = graph and num_chunks >= self._most_split
            arguments += [-1, whole, 0, 1 if graph else 0]
        plan = workspace.plan(module.plan, self._partial, *arguments)
        mask = FULL if is_single else CAUSAL
        return _Part(module, workspace, plan, first, last, mask, before, *device)


def ends_of(lengths: np.ndarray) -> np.ndarray:
    """0, and the end of each of `lengths` if they stand one after the other: int32."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends
