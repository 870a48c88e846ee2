"""Tiles of the grouped products of experts: what one program computes, by the number of tokens."""

import bisect
from typing import NamedTuple

EACH_PAIR = 0
"""Rows of a block if each token's experts are computed by themselves (`kernels.experts.few_tokens`)."""


class ProductTile(NamedTuple):
    """A program's part of one product. It computes `columns` outputs, and reads `depth` columns of the weight at a
    time, `stages` of these in flight, with `warps` warps."""

    columns: int
    depth: int
    warps: int
    stages: int


class ExpertTiles(NamedTuple):
    """The tiles of both products. A block is at most `rows` tokens of one expert; `EACH_PAIR` forms none."""

    rows: int
    gate_up: ProductTile
    down: ProductTile


# By the most (token, expert) pairs per expert, on average, for which they are used. For the shape of Qwen3-30B-A3B on
# an H200, a layer's experts take up to 29% longer with them than with the tiles that `kernels.experts.autotune` finds.
_DEFAULTS = (
    (0.1, ExpertTiles(EACH_PAIR, ProductTile(6, 2048, 4, 1), ProductTile(1, 256, 1, 12))),
    (24.0, ExpertTiles(16, ProductTile(64, 128, 4, 3), ProductTile(64, 128, 4, 4))),
    (48.0, ExpertTiles(32, ProductTile(64, 128, 4, 3), ProductTile(128, 64, 4, 4))),
    (160.0, ExpertTiles(64, ProductTile(128, 64, 8, 3), ProductTile(128, 64, 4, 4))),
)
_LARGEST = ExpertTiles(128, ProductTile(128, 64, 8, 3), ProductTile(256, 64, 8, 3))

# With weights in MXFP4.
_MXFP4_DEFAULTS = (
    (0.25, ExpertTiles(EACH_PAIR, ProductTile(16, 128, 4, 1), ProductTile(16, 128, 8, 1))),
    (24.0, ExpertTiles(16, ProductTile(64, 128, 8, 4), ProductTile(128, 128, 8, 4))),
    (48.0, ExpertTiles(32, ProductTile(64, 128, 8, 4), ProductTile(128, 128, 8, 4))),
    (96.0, ExpertTiles(64, ProductTile(64, 128, 8, 4), ProductTile(128, 128, 8, 4))),
)
_MXFP4_LARGEST = ExpertTiles(128, ProductTile(64, 128, 8, 3), ProductTile(128, 128, 8, 3))


def default_tiles(tokens: int, top_k: int, experts: int, in_mxfp4: bool = False) -> ExpertTiles:
    """Tiles for a step of `tokens` tokens that have `top_k` of `experts` experts each."""
    pairs = tokens * top_k / experts
    defaults, largest = (_MXFP4_DEFAULTS, _MXFP4_LARGEST) if in_mxfp4 else (_DEFAULTS, _LARGEST)
    return next((tiles for most, tiles in defaults if pairs <= most), largest)


class TunedTiles:
    """Tiles for some numbers of tokens. Other numbers have those of the next larger one, or of the largest."""

    def __init__(self, tiles: dict[int, ExpertTiles]) -> None:
        """tiles: by the number of tokens, at least one."""
        self.by_tokens = tiles
        self._sizes = sorted(tiles)

    def find(self, tokens: int) -> ExpertTiles:
        """Tiles for a step of `tokens` tokens."""
        index = bisect.bisect_left(self._sizes, tokens)
        return self.by_tokens[self._sizes[min(index, len(self._sizes) - 1)]]
