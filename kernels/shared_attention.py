"""What the sequences of a decoding batch share, read once for each group of them, by `kernels.range_attention`.

Imported only where there is a GPU (or Triton's interpreter).
"""

import numpy as np
import torch

from kernels import range_attention, ranges
from kernels.attention import AttentionBatch, AttentionShape, SharedPrefixes
from kernels.range_attention import PROGRAMS, Parts
from kernels.transfer import StaticArrays


class SharedAttention:
    """The shared part of a batch's attention, for batches of up to `max_sequences`, whose tables have up to `max_pages`
    pages together. Its arrays stand still, for graphs, and for as long as the groups stay the same."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, shape: AttentionShape, max_sequences: int, max_pages: int
    ) -> None:
        self.shape = shape
        self.tile = range_attention.tile_for(shape, dtype, 16)
        self._tokens = max(1, self.tile.rows * shape.num_kv_heads // shape.num_heads)
        programs = PROGRAMS * multiprocessors(device)
        self._most = -(-programs // shape.num_kv_heads)
        self.most_parts = max_sequences + self._tokens * self._most
        """Parts that prefixes leave at most."""
        self._static = StaticArrays(
            device,
            {
                "items": (torch.int32, ranges.FIELDS * (self._most + max_sequences)),
                "slots": (torch.int32, max_sequences),
                "counts": (torch.int32, max_sequences),
                "members": (torch.int32, max_sequences),
                "pages": (torch.int32, max_pages),
            },
        )
        self._planned: SharedPrefixes | None = None
        self.counts = np.zeros(0, dtype=np.int64)
        """Parts of each chunk of the planned batch."""
        self._num_items = 0

    def plan(self, batch: AttentionBatch, prefixes: SharedPrefixes, page_size: int) -> None:
        """Prepare for the layers of a step. The same object as before means the same groups with the same pages."""
        if prefixes is self._planned:
            return
        sizes = np.diff(prefixes.ends)
        tiles = -(-sizes // self._tokens)
        group = np.repeat(np.arange(len(sizes)), tiles)
        before = (np.arange(len(group)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * self._tokens
        page_ends = np.cumsum(prefixes.num_pages)
        keys = prefixes.num_pages * page_size
        nothing = np.zeros(len(group), dtype=np.int32)
        blocks = ranges.Blocks(
            prefixes.ends[group] + before,
            np.minimum(sizes[group] - before, self._tokens),
            (page_ends - prefixes.num_pages)[group],
            nothing,
            keys[group],
            nothing,
        )
        counts, lengths = ranges.cut(blocks, self._most, self.tile.keys)
        items = ranges.items(blocks, counts, lengths, nothing, np.zeros(len(group), dtype=bool))
        self.counts = np.zeros(len(batch.rows), dtype=np.int64)
        self.counts[prefixes.members] = np.repeat(counts, blocks.counts)
        leaders = batch.rows[prefixes.members[prefixes.ends[:-1]]]
        pages = [batch.tables[row, :count] for row, count in zip(leaders, prefixes.num_pages, strict=True)]
        self._static.fill(
            {
                "items": items.ravel(),
                "slots": ranges.slots(self.counts),
                "counts": self.counts,
                "members": prefixes.members,
                "pages": np.concatenate([nothing[:0], *pages]),
            }
        )
        self._planned, self._num_items = prefixes, len(items)

    def parts(self, out: torch.Tensor, lse: torch.Tensor) -> Parts:
        """Where this leaves its parts, if there are no others: in `out` and `lse` (see `Parts`)."""
        return Parts(out, lse, self._static["slots"], self._static["counts"])

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, parts: Parts, graph_size: int | None
    ) -> None:
        """Leaves the parts of the planned batch, for a layer's pages `kv`. In a graph of `graph_size` sequences, those
        of any batch that is planned before its replay."""
        num_items = self._num_items if graph_size is None else self._most + graph_size
        items = self._static["items"].view(-1, ranges.FIELDS)[:num_items]
        range_attention.attend(
            q, kv, out, parts, items, self._static["pages"], self.shape, self.tile, members=self._static["members"]
        )


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; some number for Triton's interpreter."""
    if device.type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
