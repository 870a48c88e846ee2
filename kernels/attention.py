"""Attention over a paged KV cache: the interface that every backend keeps, and what it is told once a step.

Pages: one tensor `[num_layers, 2, num_pages, num_kv_heads, page_size, head_dim]`, keys at index 0 and values at 1.
Token i of a sequence lives in page `table[i // page_size]` at offset `i % page_size`. A head's part of a page is
contiguous: whoever reads one head of a sequence reads long runs of memory.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class AttentionShape:
    """What the layers of a model have in common, and the sliding window of each.

    A query of position p sees keys of positions `p - window + 1` to p; None sees all. Scores are `scale * q @ k`; with
    a `softcap` c they become `c * tanh(score / c)`. `num_heads` is a multiple of `num_kv_heads`; query head h reads
    KV head `h // (num_heads // num_kv_heads)`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    softcap: float | None = None


@dataclass(frozen=True)
class AttentionBatch:
    """One step's chunks, in the order in which their tokens stand in q, k and v.

    Chunk c is positions `starts[c]` to `starts[c] + lengths[c]` of the sequence whose pages are
    `tables[rows[c], :]` (only the first `ceil((starts[c] + lengths[c]) / page_size)` are read). All int32, on the host.
    A row stands in a batch at most once. Chunks of one token come first: a backend may treat them apart.
    """

    tables: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_singles(self) -> int:
        """Chunks of one token. Raises ValueError unless they come first."""
        singles = int(np.count_nonzero(self.lengths == 1))
        if not (self.lengths[:singles] == 1).all():
            raise ValueError("chunks of one token must come first")
        return singles

    def part(self, first: int, last: int) -> "AttentionBatch":
        """Chunks `first` to `last` alone."""
        return AttentionBatch(self.tables, self.rows[first:last], self.starts[first:last], self.lengths[first:last])

    @property
    def firsts(self) -> np.ndarray:
        """Index of each chunk's first token in q, k and v: int64 `[num_chunks]`."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths


class Places(Protocol):
    """Where keys and values go, for whoever writes them in a backend's place: see `AttentionBackend`."""

    kv: torch.Tensor
    rows: torch.Tensor


class AttentionBackend(ABC):
    """Causal attention of chunks over their sequences' pages.

    Whatever depends only on the batch is worked out in `plan`, once a step; `run` is called once a layer after it.
    On a GPU another kernel may write the keys and values (`kernels.fused.rotate_and_store`): it finds the places in
    `rows` and `kv`, and `attend` is called in the place of `run`.
    """

    kv: torch.Tensor
    """The pages, as this module lays them out."""
    rows: torch.Tensor
    """Where the key and value of each token of the planned batch go, as `token_rows` has it: int64 on the device."""

    def __init__(self, kv: torch.Tensor, shape: AttentionShape) -> None:
        self.kv, self.shape = kv, shape
        self.page_size = kv.shape[4]
        self.device = kv.device

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for the layers of one step. `batch` is not kept changed or read after the step."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """The second half of `run`: the chunks' keys and values are in the pages of `layer` already."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write the chunks' keys and values into the pages of `layer`, then attend.

        q: `[num_tokens, num_heads, head_dim]`; k, v: `[num_tokens, num_kv_heads, head_dim]`, rotated already, in the
        pages' dtype and on their device; each token's heads are contiguous, tokens may lie further apart.
        Returns `[num_tokens, num_heads, head_dim]`, contiguous.
        """
        keys, values = self.kv[layer].flatten(1, 3)
        num_kv_heads, page_size, head_dim = self.kv.shape[3:]
        rows = (self.rows[:, None] + torch.arange(num_kv_heads, device=self.rows.device) * page_size).flatten()
        keys.index_copy_(0, rows, k.reshape(-1, head_dim))
        values.index_copy_(0, rows, v.reshape(-1, head_dim))
        return self.attend(layer, q)


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of chunks of a batch: group g is `members[ends[g] : ends[g + 1]]`, two chunks at least, and the tables of
    all of them begin with the same `num_pages[g]` pages, none of which the batch writes to. int32."""

    members: np.ndarray
    ends: np.ndarray
    num_pages: np.ndarray

    @staticmethod
    def none() -> "SharedPrefixes":
        """No groups."""
        nothing = np.zeros(0, dtype=np.int32)
        return SharedPrefixes(nothing, np.zeros(1, dtype=np.int32), nothing)

    def pages_of(self, num_chunks: int) -> np.ndarray:
        """Pages at the beginning of each chunk's table that its group reads: int32 `[num_chunks]`."""
        pages = np.zeros(num_chunks, dtype=np.int32)
        pages[self.members] = np.repeat(self.num_pages, np.diff(self.ends))
        return pages


class GraphAttention(AttentionBackend):
    """A backend whose `attend` may be captured in a CUDA graph. There are graphs for `chunks` of any length, which read
    together what sequences share; and, where `has_plain_graphs`, two kinds more, for chunks of one token alone: those
    that read so, and plain ones, which do not."""

    has_plain_graphs: bool

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.attend_into(layer, q, out)
        return out

    @abstractmethod
    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """`attend` that leaves its result in `out`, contiguous."""

    @abstractmethod
    def shared_prefixes(self, batch: AttentionBatch) -> SharedPrefixes | None:
        """Which of the batch's chunks of one token had better read together what they share; None for none."""

    @abstractmethod
    def fits_graph(self, batch: AttentionBatch) -> bool:
        """Whether a graph of ranges is the best way for a batch with chunks of more than one token."""

    @abstractmethod
    def plan_graph(
        self, batch: AttentionBatch, size: int, shared: SharedPrefixes | None, *, chunks: bool = False
    ) -> None:
        """As `plan`, for a graph of `size` tokens, of which the batch has that many or fewer. After it the graph of
        that size may be captured or replayed: `rows` has `size` entries, and those beyond the batch write into the last
        page, which is nobody's. With `chunks` that is the graph for chunks of any length; else with `shared`, be there
        none of them, the one that reads together what is shared, and with None the plain one."""


def token_positions(batch: AttentionBatch) -> np.ndarray:
    """Position of every token of the batch in its sequence: int64 `[num_tokens]`."""
    return np.arange(batch.num_tokens) + np.repeat(batch.starts - batch.firsts, batch.lengths)


def token_rows(
    batch: AttentionBatch, chunks: np.ndarray, positions: np.ndarray, num_kv_heads: int, page_size: int
) -> np.ndarray:
    """Where head 0 of tokens lies, as rows of `[num_pages * num_kv_heads * page_size, head_dim]`: those at `positions`
    of the sequences of `chunks` (integers that broadcast together). Head h is `h * page_size` rows further. int64.
    """
    page = batch.tables[batch.rows[chunks], positions // page_size].astype(np.int64)
    return page * (num_kv_heads * page_size) + positions % page_size


def flat_pages(tables: np.ndarray, rows: np.ndarray, counts: np.ndarray, firsts: np.ndarray | int = 0) -> np.ndarray:
    """Entries `firsts[i]` to `firsts[i] + counts[i]` of `tables[rows[i]]`, one after the other: int32."""
    counts = counts.astype(np.int64)
    starts = rows.astype(np.int64) * tables.shape[1] + firsts - (np.cumsum(counts) - counts)
    return tables.ravel().take(np.repeat(starts, counts) + np.arange(counts.sum()))
