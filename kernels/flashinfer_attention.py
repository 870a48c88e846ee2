"""Attention with FlashInfer's kernels, on GPUs: tensor cores for single tokens too, FlashAttention 3 for longer chunks.
Single tokens of several sequences are ours where few heads read a KV head, or where they share what they begin with
(`kernels.stream_attention`), and so are graphs of chunks of any length (`kernels.triton_attention`, beside it).

The kernels are called as FlashInfer's wrappers call them, without the wrappers: those keep buffers of their own for
every batch size, and wait for some of their copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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
from kernels.transfer import StaticArrays, Turns, all_to_device

if TYPE_CHECKING:  # Triton, which is where there is a GPU
    from kernels.stream_attention import StreamAttention

# Bytes of what the planners write for a step: some arrays of 4 bytes a tile of queries and a head.
_PLAN_BYTES = 8 << 20
# Bytes at least of what parts of a split context leave to be merged.
_PARTIAL_BYTES = 128 << 20
# Rows of queries (times heads a KV head) in the smallest tile, for chunks of one token.
_SMALLEST_TILE = 16

# Single tokens from which on streams are faster, and the query heads of a KV head up to which they are where nothing is
# shared: what is left to be merged grows with these. (H200, contexts of 100 to 2,000 tokens: by 3 to 7 us of 36 to 164
# with 2 heads, by 2 to 6 with 4; with 8 they take as long. What is shared: 235 us where ranges take 294, and 105 for
# 134.)
_STREAM_FROM, _STREAM_GROUP = 16, 4

# Operations of a step's attention to chunks from which on FlashAttention 3, which does 550 TFLOP/s, is faster by more
# than starting a step's kernels one by one takes: our own does 289 TFLOP/s, and these take it 0.3 ms more. (H200.)
_MOST_OPERATIONS = 1.8e11

_HND, _FULL, _CAUSAL = 1, 0, 1


class _Workspace:
    """Where a planner leaves its plan: a buffer on the device and, since the copy to it is not waited for, several on
    the host in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device_bytes = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
        self._turns = Turns(device, _PLAN_BYTES)

    def plan(self, planner: Callable[..., Any], partial: torch.Tensor, *arguments: Any) -> Any:
        turn = self._turns.next()
        plan = planner(partial, self.device_bytes, turn.bytes_, *arguments)
        turn.begun()
        return plan


@dataclass(frozen=True)
class _Part:
    """Consecutive chunks that one kernel attends for: tokens `first` to `last`. The arrays are on the device; `plan` is
    the planner's."""

    module: Any
    workspace: _Workspace
    plan: Any
    first: int
    last: int
    mask: int
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
    """`kv` is the pages (see `kernels.attention`), on a GPU; the last page is nobody's. At most `max_sequences` chunks
    of one token stand in a batch; a graph holds up to `max_tokens` tokens of sequences whose tables have up to
    `max_pages` pages together, a plain one up to `max_sequences`. Raises ImportError without FlashInfer.
    """

    has_plain_graphs = True

    def __init__(
        self, kv: torch.Tensor, shape: AttentionShape, max_sequences: int, max_pages: int, max_tokens: int
    ) -> None:
        from flashinfer.jit.attention import gen_batch_prefill_module
        from flashinfer.utils import is_sm90a_supported

        from kernels import stream_attention
        from kernels.triton_attention import TritonAttention, multiprocessors

        super().__init__(kv, shape)
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
        tiles = max(max_sequences, self._most_split) + 1
        partials = shape.num_heads * -(-tiles * _SMALLEST_TILE // group) * (shape.head_dim + 1) * 4
        self._partial = torch.zeros(max(_PARTIAL_BYTES, partials + 4096), dtype=torch.uint8, device=self.device)
        self._host_range = torch.arange(max_sequences + 1, dtype=torch.int32)
        self._device_range = self._host_range.to(self.device)
        self._static = StaticArrays(
            self.device,
            {
                "rows": (torch.int64, max_sequences),
                "page_ends": (torch.int32, max_sequences + 1),
                "last_page_tokens": (torch.int32, max_sequences),
                "pages": (torch.int32, max_pages + max_sequences),
            },
        )
        self._parts: list[_Part] = []
        self._ranges = TritonAttention(kv, shape, max_sequences, max_pages, max_tokens)
        # Ours, each for tokens up to its end.
        self._ours: list[tuple[int, Callable[[int, torch.Tensor, torch.Tensor], None]]] = []
        self._stream: StreamAttention | None = None
        if stream_attention.can_run(shape, kv.dtype):
            sizes = max_sequences, max_pages, multiprocessors(self.device)
            self._stream = stream_attention.StreamAttention(kv, shape, *sizes)
        self._streams_plain = group <= _STREAM_GROUP

    def shared_prefixes(self, batch: AttentionBatch) -> SharedPrefixes | None:
        return self._ranges.shared_prefixes(batch)

    def fits_graph(self, batch: AttentionBatch) -> bool:
        shape = self.shape
        lengths = batch.lengths.astype(np.int64)
        pairs = float((lengths * (batch.starts + (lengths + 1) / 2))[lengths > 1].sum())
        return 4 * shape.num_heads * shape.head_dim * len(shape.windows) * pairs <= _MOST_OPERATIONS

    def plan(self, batch: AttentionBatch) -> None:
        chunk_of_token = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        rows = token_rows(batch, chunk_of_token, token_positions(batch), self.shape.num_kv_heads, self.page_size)
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
                _ends(batch.lengths[first:last]),
                _ends(counts[first:last]),
                contexts[first:last] - (counts[first:last] - 1) * self.page_size,
                flat_pages(batch.tables, batch.rows[first:last], counts[first:last]),
            ]
        if stream is not None:
            arrays += stream.arrays(stream.work(decodes, shared))
        self.rows, *tensors = all_to_device(arrays, self.device)
        if stream is not None:
            self._ours = [(singles, partial(stream.attend_into, tensors[4 * len(parts) :]))]
        self._parts, token = [], ours
        for index, (first, last) in enumerate(parts):
            end = token + int(batch.lengths[first:last].sum())
            host, device = arrays[4 * index + 1 : 4 * index + 5], tensors[4 * index : 4 * index + 4]
            self._parts.append(self._planned(host, device, contexts[first:last], token, end))
            token = end

    def plan_graph(
        self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None, *, chunks: bool = False
    ) -> None:
        own, num_kv_heads, scratch = len(batch.rows), self.shape.num_kv_heads, self.kv.shape[2] - 1
        self._parts = []
        if chunks:
            self._plan_chunks(batch, size, shared)
            return
        stream = self._stream_for(size, shared)
        if stream is None and shared is not None:
            self._ranges.plan_graph(batch, size, shared)
            self.rows, self._ours = self._ranges.rows, [(size, self._ranges.attend_into)]
            return
        rows = np.full(size, scratch * num_kv_heads * self.page_size)
        rows[:own] = token_rows(batch, np.arange(own), batch.starts, num_kv_heads, self.page_size)
        if stream is not None:
            self.rows, streamed = stream.fill(stream.work(batch, shared, size - own), rows)
            self._ours = [(size, partial(stream.attend_into, streamed))]
            return
        self._ours = []
        # What fills the batch up is sequences of one token each, in the last page.
        contexts = np.ones(size, dtype=np.int32)
        contexts[:own] = batch.starts + batch.lengths
        counts = -(-contexts // self.page_size)
        pages = flat_pages(batch.tables, batch.rows, counts[:own])
        arrays = {
            "rows": rows,
            "page_ends": _ends(counts),
            "last_page_tokens": contexts - (counts - 1) * self.page_size,
            "pages": np.append(pages, np.full(size - own, scratch, dtype=np.int32)) if size > own else pages,
        }
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
        self._parts = [self._planned(host, device, contexts, 0, size, graph=True)]

    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        for end, attend_into in self._ours:
            attend_into(layer, q[:end], out[:end])
        keys, values = self.kv[layer]
        for part in self._parts:
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
                out[part.first : part.last],
                None,  # no sums of weights
                part.mask,
                _HND,
                -1,  # no window
                True,  # may start while the kernel before it ends
                *(self._fa3_arguments if self._is_hopper and part.mask == _CAUSAL else self._fa2_arguments),
            )

    def _plan_chunks(self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None) -> None:
        """A graph of ranges, for chunks, and of a stream, for the single tokens where these are many and share nothing.
        Its kernels are always the same, whoever has nothing to do."""
        singles = batch.num_singles
        if self._stream is None or singles < _STREAM_FROM or (shared is not None and len(shared.members)):
            singles = 0
        self._ranges.plan_graph(batch, size, shared, chunks=True, first=singles)
        self.rows, self._ours = self._ranges.rows, [(size, self._ranges.attend_into)]
        if self._stream is not None:
            work = self._stream.work(batch.part(0, singles), None)
            _, arrays = self._stream.fill(work, np.empty(0, dtype=np.int64))
            self._ours.append((size, partial(self._stream.attend_into, arrays)))

    def _stream_for(self, singles: int, shared: SharedPrefixes | None) -> "StreamAttention | None":
        """What attends for so many single tokens, if it is a stream."""
        is_faster = singles >= _STREAM_FROM and (shared is not None or self._streams_plain)
        return self._stream if is_faster else None

    def _planned(
        self,
        host: list[np.ndarray],
        device: list[torch.Tensor],
        contexts: np.ndarray,
        first: int,
        last: int,
        *,
        graph: bool = False,
    ) -> _Part:
        """`host` begins with the ends of the chunks' queries and of their pages; `device` is `_Part`'s arrays."""
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
        return _Part(module, workspace, plan, first, last, mask, *device)


def _ends(lengths: np.ndarray) -> np.ndarray:
    """0 and where each of these ends, one after the other: int32."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends
