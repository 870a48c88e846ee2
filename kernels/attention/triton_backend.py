"""Split-KV attention with our own kernels, on GPUs. One launch a layer serves all chunks of a step.

Shared prefixes, the rest of each sequence, and longer chunks are cut into ranges of keys that fill the GPU together
(`kernels.attention.split_kv_plan`). Unlike FlashInfer's kernels these support float32, sinks, head dimensions of
any size, and CUDA graphs of chunks of any length. Without such graphs, steps of decodes and chunks took some 0.75 ms
more than their arithmetic on an H200.

Imported only where there is a GPU (or Triton's interpreter).
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import split_kv_kernel, split_kv_plan
from kernels.attention.interface import (
    AttentionBatch,
    AttentionShape,
    GraphAttention,
    SharedPrefixes,
)
from kernels.attention.shared_prefix import SharedPrefixFinder
from kernels.attention.split_kv_kernel import PROGRAMS, PartialOutputs
from kernels.host_device import GraphInputs, all_to_device

# Least keys of a range in a graph of chunks: merging the parts of shorter ranges takes longer than these save. (H200,
# chunks of 124 to 228 tokens after 0 to 800: 12 to 25 us a layer where ranges of one tile took 16 to 28.)
_LEAST_KEYS = 384


@dataclass(frozen=True)
class _WindowView:
    """The plan for the layers of one window, on the device (see `kernels.attention.split_kv_plan.SplitKVPlan`)."""

    items: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor
    has_parts: bool


class TritonAttention(GraphAttention):
    """Attention over the pages `kv` (see `kernels.attention.interface`). No sequence uses the last page.

    A batch has at most `max_sequences` chunks of one token. A graph has up to `max_tokens` tokens; its sequences have
    up to `max_pages` pages together.
    """

    has_plain_graphs = False

    def __init__(
        self,
        kv: torch.Tensor,
        shape: AttentionShape,
        max_sequences: int,
        max_pages: int,
        max_tokens: int,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__(kv, shape, sinks)
        self._tiles = split_kv_kernel.tiles_for(shape, kv.dtype)
        self._tile_tokens = self._tiles.wide * shape.num_kv_heads // shape.num_heads
        self._most = -(-PROGRAMS * multiprocessors(self.device) // shape.num_kv_heads)
        self._finder = SharedPrefixFinder(self.page_size, shape, kv.dtype.itemsize)
        # Parts of blocks that are cut (see `split_kv_plan.work`). A block that is not cut leaves at most two parts a
        # sequence: one of its group's prefix, and one of its own keys.
        most_parts = 2 * self._tile_tokens * self._most + 2 * max_sequences
        self._part_out = torch.empty(
            most_parts, shape.num_heads, shape.head_dim, dtype=torch.float32, device=self.device
        )
        self._part_lse = torch.empty(most_parts, shape.num_heads, dtype=torch.float32, device=self.device)
        self._windows = set(shape.windows)
        # Layers with a window do not see the prefix of a long context.
        self._shares_prefixes = None in self._windows
        # One set of tensors, so that one copy a step fills it: each further copy takes the host some 20 us, in which a
        # step with drafts keeps the device waiting.
        views = {
            name: (torch.int32, length)
            for window in self._windows
            for name, length in zip(
                _names(window),
                (split_kv_plan.FIELDS * self._most_items(max_tokens), max_tokens, max_tokens),
                strict=True,
            )
        }
        self._static = GraphInputs(
            self.device,
            {
                "rows": (torch.int64, max_tokens),
                "members": (torch.int32, max_sequences),
                **views,
                "pages": (torch.int32, max_pages + 1),
            },
        )
        self._views: dict[int | None, _WindowView] = {}
        self._members = self._pages = torch.empty(0, dtype=torch.int32, device=self.device)

    def shared_prefixes(self, batch: AttentionBatch) -> SharedPrefixes | None:
        if not self._shares_prefixes:
            return None
        singles = batch.num_singles
        return self._finder.find(batch.part(0, singles)) if singles > 1 else None

    def fits_graph(self, batch: AttentionBatch) -> bool:
        return True

    def plan(self, batch: AttentionBatch) -> None:
        self.plan_shared(batch, self.shared_prefixes(batch) or SharedPrefixes.none())

    def plan_shared(self, batch: AttentionBatch, shared: SharedPrefixes) -> None:
        """Like `plan`, with the groups that share prefixes given."""
        tables, works = self._work(batch, shared, 0)
        arrays = [self._rows(batch, 0), shared.members, tables.pages]
        for work in works.values():
            arrays += [work.items, work.slots, work.counts]
        self.slots, self._members, self._pages, *tensors = all_to_device(arrays, self.device)
        for index, (window, work) in enumerate(works.items()):
            items, slots, counts = tensors[3 * index : 3 * index + 3]
            self._views[window] = _WindowView(items, slots, counts, bool(work.counts.any()))

    def plan_graph(
        self,
        batch: AttentionBatch,
        size: int,
        shared: SharedPrefixes | None,
        *,
        chunks: bool = False,
        first: int = 0,
    ) -> None:
        """As the interface says. The first `first` chunks are left out: single tokens that share nothing, for which
        another kernel attends."""
        rest = batch.part(first, len(batch.rows))
        least = _LEAST_KEYS if chunks else 1
        tables, works = self._work(rest, shared or SharedPrefixes.none(), size - batch.num_tokens, least, first)
        members = shared.members if shared is not None else np.zeros(0, dtype=np.int32)
        rows = self._rows(batch, size - batch.num_tokens)
        arrays = {"rows": rows, "members": members, "pages": tables.pages}
        for window, work in works.items():
            arrays |= zip(_names(window), (work.items.ravel(), work.slots, work.counts), strict=True)
        static = self._static
        static.fill(arrays)
        self.slots, self._members, self._pages = static["rows"][:size], static["members"], static["pages"]
        for window in works:
            items, slots, counts = (static[name] for name in _names(window))
            # The kernels of a graph run over all items that there is room for. Unused items have no queries.
            items = items.view(-1, split_kv_plan.FIELDS)[: self._most_items(size)]
            self._views[window] = _WindowView(items, slots[:size], counts[:size], True)

    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        window = self.shape.windows[layer]
        view = self._views[window]
        parts = PartialOutputs(self._part_out, self._part_lse, view.slots, view.counts)
        sinks = None if self.sinks is None else self.sinks[layer]
        split_kv_kernel.attend(
            q,
            self.kv[layer],
            out,
            parts,
            view.items,
            self._members,
            self._pages,
            self.shape,
            self._tiles,
            window,
            sinks,
        )
        if view.has_parts:
            split_kv_kernel.merge(out, parts, sinks)

    def _work(
        self, batch: AttentionBatch, shared: SharedPrefixes, padding: int, least: int = 1, behind: int = 0
    ) -> tuple[split_kv_plan.PageLists, dict[int | None, split_kv_plan.SplitKVPlan]]:
        """The pages that the batch reads, and a plan for the layers of each window.

        `padding` tokens are added after the batch, and `behind` in front of it, for which there is nothing to do.
        Ranges have about `least` keys or more.
        """
        # Layers with a window read a chunk's keys from its own pages, also those that the group's prefix has.
        tables = split_kv_plan.tables(batch, shared, self.page_size, repeat=len(self._windows) > 1, spare=1)
        # Padding tokens see one token of the last page, which stands at the end of the list.
        tables.pages[-1] = self._scratch
        seen = shared.pages_of(len(batch.rows)).astype(np.int64) * self.page_size
        works = {}
        for window in self._windows:
            together = shared if window is None else SharedPrefixes.none()
            works[window] = split_kv_plan.work(
                batch,
                together,
                split_kv_plan.of_groups(together, tables.groups, self.page_size, self._tile_tokens),
                tables.chunks,
                seen,
                window,
                tile_tokens=self._tile_tokens,
                most=self._most,
                step=self._tiles.keys,
                least=least,
                behind=behind,
                padding=padding,
                scratch=len(tables.pages) - 1,
            )
        return tables, works

    def _rows(self, batch: AttentionBatch, padding: int) -> np.ndarray:
        """The slots of the batch's tokens, and those of `padding` tokens after it, which are in the last page."""
        return split_kv_plan.token_rows(batch, self.shape.num_kv_heads, self.page_size, padding, self._scratch)

    @property
    def _scratch(self) -> int:
        return self.kv.shape[2] - 1

    def _most_items(self, tokens: int) -> int:
        """Most items of a graph of `tokens` tokens. Each token may be a block; each two may be a group, whose prefix is
        one more block, or two if a tile has room for one token only."""
        return self._most + tokens + (tokens // 2 if self._tile_tokens > 1 else tokens)


def _names(window: int | None) -> tuple[str, str, str]:
    """Names of the tensors that hold the items, slots and counts of the layers of a window."""
    return f"items {window}", f"slots {window}", f"counts {window}"


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; an arbitrary number for Triton's interpreter."""
    if device.type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
