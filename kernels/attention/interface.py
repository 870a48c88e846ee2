"""Attention over a paged KV cache: the interface of all backends, and the description of a batch that they plan by.

The pages are one tensor `[num_layers, 2, num_pages, num_kv_heads, page_size, head_dim]`, keys at index 0 of the second
dimension and values at 1. Token i of a sequence is in page `table[i // page_size]` at offset `i % page_size`. Each
head's part of a page is contiguous, so that a kernel which reads one head of a sequence reads long runs of memory.

A model with latent attention (`LatentHeads`) has no values: its pages are `[num_layers, 1, num_pages, 1, page_size,
kv_lora_rank + qk_rope_head_dim]`. A token has one row, which all heads read: its latent, then its rotated key.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class LatentHeads:
    """Sizes of multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1), in elements. The names are
    those of Hugging Face configurations.

    | field | meaning |
    | --- | --- |
    | `kv_lora_rank` | a token's latent, of which the keys and values of all heads are products |
    | `qk_nope_head_dim` | the part of a head's query and key that is not rotated |
    | `qk_rope_head_dim` | the part that is rotated; that of a key is the same for all heads |
    | `v_head_dim` | a head's value |
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def row(self) -> int:
        """A token's row in the pages: its latent, then its rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query(self) -> int:
        """A head's query: the part that is not rotated, then the rotated one."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def up(self) -> int:
        """A head's key without the rotated part, and its value: products of the latent."""
        return self.qk_nope_head_dim + self.v_head_dim


@dataclass(frozen=True)
class AttentionShape:
    """The attention of a model: layers have the same heads, and each layer has its own window in `windows`.

    - A query at position p sees the keys at positions `p - window + 1` to p; with None it sees all up to p.
    - `in_chunks`: windows are chunks. A query at position p sees the keys from `p // window * window` to p. No backend
      has such layers (`kernels.attention.window_pages`).
    - With `full_heads`, the layers without a window have other heads than `num_heads`, `num_kv_heads` and `head_dim`
      say: these three numbers of their own. No backend has layers of both kinds (`kernels.attention.window_pages`).
    - Scores are `scale * q @ k`; a `softcap` c makes them `c * tanh(score / c)`.
    - `num_heads` is a multiple of `num_kv_heads`: query head h reads KV head `h // (num_heads // num_kv_heads)`.
    - With `latent` heads, there is one KV head, and `head_dim` is `latent.row`. Queries have `latent.query` elements,
      outputs `latent.v_head_dim`.
    - With `has_sinks`, each head of a layer has a sink: a score that joins the sum of the softmax, and has no value
      (https://arxiv.org/abs/2309.17453, gpt-oss's form).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    softcap: float | None = None
    latent: LatentHeads | None = None
    has_sinks: bool = False
    full_heads: tuple[int, int, int] | None = None
    in_chunks: bool = False


@dataclass(frozen=True)
class AttentionBatch:
    """The chunks of one step, in the order in which their tokens stand in q, k and v. All int32, on the host.

    | field | shape | meaning |
    | --- | --- | --- |
    | `tables` | `[num_rows, most pages]` | page tables, one row per sequence |
    | `rows` | `[num_chunks]` | the row of each chunk's sequence; no row occurs twice |
    | `starts` | `[num_chunks]` | position of each chunk's first token in its sequence |
    | `lengths` | `[num_chunks]` | tokens of each chunk |
    | `window_tables` | as `tables` | page tables of layers with a window, where these have pages of their own |

    Only the first `ceil((starts[c] + lengths[c]) / page_size)` pages of a row are read. Chunks of one token come first:
    backends treat those before any longer one separately, and others as longer ones.
    """

    tables: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    window_tables: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_singles(self) -> int:
        """Number of chunks of one token before any longer one."""
        longer = (self.lengths != 1).nonzero()[0]
        return int(longer[0]) if len(longer) else len(self.lengths)

    def part(self, first: int, last: int) -> "AttentionBatch":
        """The batch of chunks `first` to `last` (exclusive) alone."""
        chunks = self.rows[first:last], self.starts[first:last], self.lengths[first:last]
        return AttentionBatch(self.tables, *chunks, self.window_tables)

    @property
    def firsts(self) -> np.ndarray:
        """Index of each chunk's first token in q, k and v: int64 `[num_chunks]`."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths


class KVSlots(Protocol):
    """Where a kernel that writes keys and values in the backend's place puts them: see `AttentionBackend`."""

    def place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`slots`, and the layer's pages, `[2, num_pages, num_kv_heads, page_size, head_dim]`."""


class AttentionBackend(ABC):
    """Causal attention of chunks over their sequences' pages.

    `plan`, called once a step, does all work that depends on the batch only. `run` follows once a layer. On a GPU
    another kernel may write the keys and values (`kernels.ops.fused.rotate_and_store`), to `place(layer)`; then
    `attend` is called instead of `run`.
    """

    kv: torch.Tensor
    """The pages, in the layout that this module's docstring gives."""
    slots: torch.Tensor
    """Where the key and value of each token of the planned batch go, as `slot_mapping` numbers it: int64, on the
    device."""

    def __init__(self, kv: torch.Tensor, shape: AttentionShape, sinks: torch.Tensor | None = None) -> None:
        """sinks: of every layer, float32 `[num_layers, num_heads]`, on the pages' device. Raises ValueError unless they
        are given for a shape that has them, and for no other."""
        if (sinks is not None) != shape.has_sinks:
            raise ValueError("attention gets sinks if, and only if, its shape has them")
        self.kv, self.shape, self.sinks = kv, shape, sinks
        self.page_size = kv.shape[4]
        self.device = kv.device

    @property
    def pools(self) -> Sequence["AttentionBackend"]:
        """The backends with pages of their own, each for some of the layers: this one, or those that it consists of."""
        return [self]

    @property
    def layout(self) -> Sequence[tuple[int, int]]:
        """For each layer, the number of its pool and its own number there."""
        return [(0, layer) for layer in range(len(self.shape.windows))]

    def place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `KVSlots.place`, for the planned batch."""
        return self.slots, self.kv[layer]

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for the layers of one step. The backend does not change `batch`, nor read it after the step."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """The second half of `run`: attend with keys and values that are in the pages of `layer` already."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write the chunks' keys and values into the pages of `layer`, then attend.

        q: `[num_tokens, num_heads, head_dim]`; k, v: `[num_tokens, num_kv_heads, head_dim]`. All have been rotated, and
        have the pages' dtype and device. The heads of one token are contiguous; tokens may have any stride.
        Returns `[num_tokens, num_heads, head_dim]`, contiguous. With latent heads, k is the tokens' rows of the pages,
        and v is not read.
        """
        num_kv_heads, page_size, head_dim = self.kv.shape[3:]
        rows = (self.slots[:, None] + torch.arange(num_kv_heads, device=self.slots.device) * page_size).flatten()
        for pages, new in zip(self.kv[layer].flatten(1, 3), (k, v), strict=False):  # latent pages have no values
            pages.index_copy_(0, rows, new.reshape(-1, head_dim))
        return self.attend(layer, q)


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of chunks that share a prefix, so that attention may read it once for all of them. All int32.

    | field | shape | meaning |
    | --- | --- | --- |
    | `members` | `[ends[-1]]` | chunks of the batch, by index, one group after the other |
    | `ends` | `[num_groups + 1]` | group g is `members[ends[g] : ends[g + 1]]`, at least two chunks |
    | `num_pages` | `[num_groups]` | pages that the tables of all members begin with; the batch writes to none of them |
    """

    members: np.ndarray
    ends: np.ndarray
    num_pages: np.ndarray

    @staticmethod
    def none() -> "SharedPrefixes":
        """No groups."""
        nothing = np.zeros(0, dtype=np.int32)
        return SharedPrefixes(nothing, np.zeros(1, dtype=np.int32), nothing)

    def pages_of(self, num_chunks: int) -> np.ndarray:
        """Number of pages of each chunk that its group shares, 0 for a chunk in no group: int32 `[num_chunks]`."""
        pages = np.zeros(num_chunks, dtype=np.int32)
        pages[self.members] = np.repeat(self.num_pages, np.diff(self.ends))
        return pages


class GraphAttention(AttentionBackend):
    """A backend whose `attend` may be captured in a CUDA graph.

    | kind of graph | chunks | a shared prefix is read | supported |
    | --- | --- | --- | --- |
    | of chunks | of any length | once for its group | always |
    | shared | of one token | once for its group | always |
    | plain | of one token | once for each sequence | if `has_plain_graphs` |
    """

    has_plain_graphs: bool

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.attend_into(layer, q, out)
        return out

    @abstractmethod
    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Like `attend`, but writes the result to `out`, contiguous."""

    @abstractmethod
    def shared_prefixes(self, batch: AttentionBatch) -> SharedPrefixes | None:
        """The groups of the batch's chunks of one token for which reading a shared prefix once pays; None if it pays
        for no group."""

    @abstractmethod
    def fits_graph(self, batch: AttentionBatch) -> bool:
        """Whether a graph of chunks is the fastest way to run a batch that has chunks of more than one token."""

    @abstractmethod
    def plan_graph(
        self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None, *, chunks: bool = False
    ) -> None:
        """Like `plan`, for a graph of `size` tokens: afterwards the graph of that size may be captured or replayed.

        The batch has up to `size` tokens. `slots` has `size` entries; those beyond the batch write to the last page,
        which no sequence uses. `chunks` and `shared` choose the kind of graph: with `chunks` the graph of chunks;
        otherwise the plain graph if `shared` is None, and the shared graph if not, even if `shared` has no groups.
        """


def token_positions(batch: AttentionBatch) -> np.ndarray:
    """Position of every token of the batch in its sequence: int64 `[num_tokens]`."""
    return np.arange(batch.num_tokens) + np.repeat(batch.starts - batch.firsts, batch.lengths)


def slot_mapping(
    batch: AttentionBatch, chunks: np.ndarray, positions: np.ndarray, num_kv_heads: int, page_size: int
) -> np.ndarray:
    """Where the tokens at `positions` of the sequences of `chunks` (integers that broadcast together) have head 0.

    The result is int64: rows of one layer's keys or values, as `[num_pages * num_kv_heads * page_size, head_dim]`. Head
    h of a token is `h * page_size` rows further.
    """
    page = batch.tables[batch.rows[chunks], positions // page_size].astype(np.int64)
    return page * (num_kv_heads * page_size) + positions % page_size


def flat_pages(tables: np.ndarray, rows: np.ndarray, counts: np.ndarray, firsts: np.ndarray | int = 0) -> np.ndarray:
    """Entries `firsts[i]` to `firsts[i] + counts[i]` of `tables[rows[i]]`, one after the other: int32."""
    counts = counts.astype(np.int64)
    starts = rows.astype(np.int64) * tables.shape[1] + firsts - (np.cumsum(counts) - counts)
    return tables.ravel().take(np.repeat(starts, counts) + np.arange(counts.sum()))
