"""Tokens of a step, grouped by the device slot of their adapter."""

from typing import NamedTuple

import numpy as np
import torch

from kernels.host_device import GraphInputs

TILE = 16  # tokens of one adapter that a program of the kernels takes: the least that tensor cores multiply

BLOCK_COLUMNS = 512  # outputs that a program of the expanding kernel computes; with 256 a layer takes 2% longer


class Tiles(NamedTuple):
    """Tokens in the order of their adapters, cut into tiles of at most `TILE` tokens of one adapter. Those without an
    adapter come first.

    | field | shape | meaning |
    | --- | --- | --- |
    | `order` | int32 [tokens] | the tokens by index, those of one adapter next to each other |
    | `slots` | int32 [tiles] | the adapter's slot, -1 for none |
    | `firsts`, `counts` | int32 [tiles] | place of the tile's first token in `order`, and number of its tokens |
    """

    order: np.ndarray
    slots: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, slots: np.ndarray) -> "Tiles":
        """The tiles of tokens whose adapters are in `slots`: integer [n], -1 for a token without one."""
        order = np.argsort(slots, kind="stable").astype(np.int32)
        present, firsts, counts = np.unique(slots[order], return_index=True, return_counts=True)
        tiles = -(-counts // TILE)
        within = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        tile_firsts = np.repeat(firsts, tiles) + TILE * within
        tile_counts = np.minimum(TILE, np.repeat(firsts + counts, tiles) - tile_firsts)
        return cls(order, *(part.astype(np.int32) for part in (np.repeat(present, tiles), tile_firsts, tile_counts)))


def most_tiles(tokens: int, num_slots: int) -> int:
    """The most tiles that `tokens` tokens can have: the grid of a CUDA graph of that size. Of each adapter, and of the
    tokens without one, a single tile may have less than `TILE` tokens."""
    return min(tokens, (tokens + (TILE - 1) * (num_slots + 1)) // TILE)


class Segments:
    """Groups of the newest step. On a GPU the tiles are in tensors at fixed addresses, which CUDA graphs read.

    | attribute | meaning |
    | --- | --- |
    | `num_tiles` | tiles that a launch has, those without tokens included |
    | `groups` | on a CPU, each slot that has tokens, with the indices of its tokens, int64 |
    """

    def __init__(self, max_tokens: int, num_slots: int, device: torch.device) -> None:
        self.num_tiles = 0
        self.groups: list[tuple[int, torch.Tensor]] = []
        self._num_slots = num_slots
        self._inputs: GraphInputs | None = None
        if device.type == "cuda":
            tiles = (torch.int32, most_tiles(max_tokens, num_slots))
            layout = {"counts": tiles, "slots": tiles, "firsts": tiles, "order": (torch.int32, max_tokens)}
            self._inputs = GraphInputs(device, layout)

    def fill(self, slots: np.ndarray, size: int | None = None) -> None:
        """Takes a step's tokens. `slots`: integer [n], the slot of each token's adapter, -1 for none. `size`: the
        tokens of the CUDA graph that will run, by default n; those after the step's have no adapter."""
        if self._inputs is None:
            present = np.unique(slots[slots >= 0]).tolist()
            self.groups = [(slot, torch.from_numpy(np.flatnonzero(slots == slot))) for slot in present]
            return
        if size is not None:
            slots = np.append(slots, np.full(size - len(slots), -1))
        tiles = Tiles.of(slots)
        self.num_tiles = len(tiles.slots) if size is None else most_tiles(size, self._num_slots)
        self._inputs.fill(tiles._asdict())

    def __getitem__(self, name: str) -> torch.Tensor:
        """A field of `Tiles` on the GPU. Tiles after those of the step have no tokens."""
        assert self._inputs is not None
        return self._inputs[name]
