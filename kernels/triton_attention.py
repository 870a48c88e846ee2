"""Attention with our own kernels, on GPUs, in one launch for all of a step: what sequences share, the rest of each, and
longer chunks, cut into ranges that fill the GPU together. It serves float32, sliding windows, softcaps and head
dimensions of any size, which FlashInfer's kernels lack, and whatever graphs need.

Imported only where there is a GPU (or Triton's interpreter).
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels import range_attention, ranges
from kernels.attention import (
    AttentionBatch,
    AttentionShape,
    GraphAttention,
    SharedPrefixes,
    token_positions,
    token_rows,
)
from kernels.prefixes import PrefixFinder
from kernels.range_attention import PROGRAMS, Parts
from kernels.transfer import StaticArrays, all_to_device

# Of a range in a graph of chunks: what shorter ones leave to be merged takes longer than they save. (H200, chunks of
# 124 to 228 tokens after 0 to 800: 12 to 25 us a layer where ranges of one tile took 16 to 28.)
_LEAST_KEYS = 384


@dataclass(frozen=True)
class _View:
    """What the layers of one window compute: items, and the parts that they leave, on the device."""

    items: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor
    has_parts: bool


class TritonAttention(GraphAttention):
    """`kv` is the pages (see `kernels.attention`); the last page is nobody's. At most `max_sequences` chunks of one
    token stand in a batch; a graph holds up to `max_tokens` tokens of sequences whose tables have up to `max_pages`
    pages together."""

    has_plain_graphs = False

    def __init__(
        self, kv: torch.Tensor, shape: AttentionShape, max_sequences: int, max_pages: int, max_tokens: int
    ) -> None:
        super().__init__(kv, shape)
        self._tiles = range_attention.tiles_for(shape, kv.dtype)
        self._tile_tokens = self._tiles.wide * shape.num_kv_heads // shape.num_heads
        self._most = -(-PROGRAMS * multiprocessors(self.device) // shape.num_kv_heads)
        self._finder = PrefixFinder(self.page_size, shape, kv.dtype.itemsize)
        # Of blocks that are cut (see `ranges.cut`), and else one of each sequence's group and one of its own.
        most_parts = 2 * self._tile_tokens * self._most + 2 * max_sequences
        self._part_out = torch.empty(
            most_parts, shape.num_heads, shape.head_dim, dtype=torch.float32, device=self.device
        )
        self._part_lse = torch.empty(most_parts, shape.num_heads, dtype=torch.float32, device=self.device)
        self._windows = set(shape.windows)
        # What a window leaves of a context is not what it begins with.
        self._shares_prefixes = None in self._windows
        self._static = StaticArrays(
            self.device,
            {
                "rows": (torch.int64, max_tokens),
                "members": (torch.int32, max_sequences),
                "pages": (torch.int32, max_pages + 1),
            },
        )
        self._static_views = {
            window: StaticArrays(
                self.device,
                {
                    "slots": (torch.int32, max_tokens),
                    "counts": (torch.int32, max_tokens),
                    "items": (torch.int32, ranges.FIELDS * self._most_items(max_tokens)),
                },
            )
            for window in self._windows
        }
        self._views: dict[int | None, _View] = {}
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
        """As `plan`, where what is read together is known."""
        tables, works = self._work(batch, shared, 0)
        arrays = [self._rows(batch, 0), shared.members, tables.pages]
        for work in works.values():
            arrays += [work.items, work.slots, work.counts]
        self.rows, self._members, self._pages, *tensors = all_to_device(arrays, self.device)
        for index, (window, work) in enumerate(works.items()):
            items, slots, counts = tensors[3 * index : 3 * index + 3]
            self._views[window] = _View(items, slots, counts, bool(work.counts.any()))

    def plan_graph(
        self,
        batch: AttentionBatch,
        size: int,
        shared: SharedPrefixes | None,
        *,
        chunks: bool = False,
        first: int = 0,
    ) -> None:
        """The `first` chunks, if any, are single tokens that share nothing and that somebody else attends for."""
        rest = batch.part(first, len(batch.rows))
        least = _LEAST_KEYS if chunks else 1
        tables, works = self._work(rest, shared or SharedPrefixes.none(), size - batch.num_tokens, least)
        members = shared.members if shared is not None else np.zeros(0, dtype=np.int32)
        rows = self._rows(batch, size - batch.num_tokens)
        self._static.fill({"rows": rows, "members": members, "pages": tables.pages})
        self.rows, self._members, self._pages = (
            self._static["rows"][:size],
            self._static["members"],
            self._static["pages"],
        )
        for window, own in works.items():
            work = own.behind(first)
            static, most = self._static_views[window], self._most_items(size)
            # The kernels of a graph run over all the items that there is room for: those beyond have no queries.
            items = np.zeros((most, ranges.FIELDS), dtype=np.int32)
            items[: len(work.items)] = work.items
            static.fill({"slots": work.slots, "counts": work.counts, "items": items.ravel()})
            on_device = static["items"].view(-1, ranges.FIELDS)[:most]
            self._views[window] = _View(on_device, static["slots"][:size], static["counts"][:size], True)

    def attend_into(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        window = self.shape.windows[layer]
        view = self._views[window]
        parts = Parts(self._part_out, self._part_lse, view.slots, view.counts)
        range_attention.attend(
            q, self.kv[layer], out, parts, view.items, self._members, self._pages, self.shape, self._tiles, window
        )
        if view.has_parts:
            range_attention.merge(out, parts)

    def _work(
        self, batch: AttentionBatch, shared: SharedPrefixes, padding: int, least: int = 1
    ) -> tuple[ranges.Tables, dict[int | None, ranges.Work]]:
        """The pages that the batch reads, and what the layers of each window do, with `padding` tokens beyond it, in
        ranges of `least` keys."""
        # Layers with a window see of a context what others have from a group.
        tables = ranges.tables(batch, shared, self.page_size, repeat=len(self._windows) > 1)
        starts, lengths, places = batch.starts, batch.lengths, tables.chunks
        seen = shared.pages_of(len(starts)) * self.page_size
        if padding:
            # They see one token of the last page, on the list after all others.
            zeros = np.zeros(padding, dtype=np.int32)
            starts, lengths, seen = (
                np.concatenate(pair) for pair in ((starts, zeros), (lengths, zeros + 1), (seen, zeros))
            )
            places = np.concatenate((places, np.full(padding, len(tables.pages))))
            pages = np.append(tables.pages, np.int32(self._scratch))
            tables = ranges.Tables(pages, tables.groups, tables.chunks)
        works = {}
        for window in self._windows:
            together = shared if window is None else SharedPrefixes.none()
            groups = ranges.of_groups(together, tables.groups, self.page_size, self._tile_tokens)
            chunks = ranges.of_chunks(starts, lengths, places, seen, window, self._tile_tokens)
            works[window] = ranges.work(together, groups, chunks, self._most, self._tiles.keys, least)
        return tables, works

    def _rows(self, batch: AttentionBatch, padding: int) -> np.ndarray:
        """Where keys and values go: those of `padding` tokens beyond the batch into the last page."""
        chunk_of_token = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        rows = token_rows(batch, chunk_of_token, token_positions(batch), self.shape.num_kv_heads, self.page_size)
        return np.concatenate((rows, np.full(padding, self._scratch * self.shape.num_kv_heads * self.page_size)))

    @property
    def _scratch(self) -> int:
        return self.kv.shape[2] - 1

    def _most_items(self, tokens: int) -> int:
        """Of a graph of so many tokens, each of which may be a block of its own, or two in a group of its own."""
        return self._most + tokens + (tokens // 2 if self._tile_tokens > 1 else tokens)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; some number for Triton's interpreter."""
    if device.type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
