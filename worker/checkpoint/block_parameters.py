"""Parameters that keep the blocks of a checkpoint, while their parts are read."""

from collections import defaultdict
from collections.abc import Mapping

import torch

from kernels.linear.block_weight import BlockMatrix, Blocks
from worker.checkpoint.tensors import ReadBlocks


class BlockParameters:
    """The blocks read so far, by parameter. `shapes`: those of all parameters."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._parts: dict[str, list[tuple[int, Blocks]]] = defaultdict(list)

    def add(
        self, name: str, read: ReadBlocks, dim: int, first: int, kept: range, order: torch.Tensor | None = None
    ) -> None:
        """Reads the part `kept` along `dim`, which a parameter has from `first` on. `order`: of its rows."""
        if len(kept):
            blocks = read(dim, kept)
            self._parts[name].append((first if dim == 0 else 0, blocks if order is None else blocks.rows(order)))

    def finish(self, name: str, dtype: torch.dtype) -> BlockMatrix | torch.Tensor:
        """The parameter, all of whose parts were added, with zeros where it has none. One without any part is of
        `dtype`. Raises ValueError if its columns are no whole blocks."""
        rows, columns = self._shapes[name]
        parts = sorted(self._parts.pop(name, []), key=lambda part: part[0])
        if not parts:
            return torch.zeros(rows, columns, dtype=dtype)
        ends = [first for first, _ in parts[1:]] + [rows]
        for _, blocks in parts:
            if columns % (blocks.group * blocks.share):
                size = blocks.group * blocks.share
                raise ValueError(
                    f"{name} has {columns} columns on each rank, no whole blocks of {size}: choose another tp, or set "
                    "dequantize"
                )
        return BlockMatrix.of(
            [blocks.padded(end - first, columns) for (first, blocks), end in zip(parts, ends, strict=True)]
        )
