"""Attention over a paged KV cache: the interface that every backend keeps, and what it is told once a step.

Pages: one tensor `[num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]`, keys at index 0 and values at 1.
Token i of a sequence lives in page `table[i // page_size]` at offset `i % page_size`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

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
    A row stands in a batch at most once.
    """

    tables: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


class AttentionBackend(ABC):
    """Causal attention of chunks over their sequences' pages.

    Whatever depends only on the batch is worked out in `plan`, once a step; `run` is called once a layer after it.
    """

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for the layers of one step. `batch` is not kept changed or read after the step."""

    @abstractmethod
    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write the chunks' keys and values into the pages of `layer`, then attend.

        q: `[num_tokens, num_heads, head_dim]`; k, v: `[num_tokens, num_kv_heads, head_dim]`, rotated already, in the
        pages' dtype and on their device; the last dimension is contiguous, the others need not be.
        Returns `[num_tokens, num_heads, head_dim]`, contiguous.
        """


def token_positions(batch: AttentionBatch) -> np.ndarray:
    """Position of every token of the batch in its sequence: int64 `[num_tokens]`."""
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    firsts = ends - batch.lengths
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(batch.starts - firsts, batch.lengths)


def token_slots(batch: AttentionBatch, page_size: int) -> np.ndarray:
    """Where every token's key and value go: `page * page_size + offset`, int64 `[num_tokens]`."""
    positions = token_positions(batch)
    rows = np.repeat(batch.rows, batch.lengths)
    return batch.tables[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size
