"""The matrices of a GGUF file that a folder refers to, by Hugging Face's names.

A model's folder may have `gguf.json`, which `cluster.gguf_index` writes, next to its safetensors: where each quantized
matrix stands in the file `model.gguf`, and in which format. So a replica parses no GGUF file when it starts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from kernels.linear.block_linear import BlockProduct
from kernels.linear.block_weight import Blocks, BlockWeight
from kernels.linear.ggml_blocks import FORMATS, read_blocks
from worker.checkpoint.gguf_layout import FILE, INDEX, Index, Matrix

KEPT_FORMATS = tuple(FORMATS)
"""ggml's names of the formats whose matrices are kept as they are."""


class GGUFMatrix:
    """A quantized matrix of a file, of which parts can be read."""

    def __init__(self, name: str, matrix: Matrix, file: Any, order: np.ndarray | None) -> None:
        self.name, self.shape = name, matrix.shape
        self._matrix, self._order = matrix, order
        rows, columns = matrix.shape
        own = FORMATS[matrix.format]
        size = columns // own.columns * own.bytes
        self._rows = file[matrix.offset : matrix.offset + rows * size].reshape(rows, size)

    def blocks(self, dim: int, part: range) -> Blocks:
        """The part of the matrix along a dimension. Raises ValueError if it begins or ends inside of a block."""
        own = FORMATS[self._matrix.format]
        if dim == 0:
            return read_blocks(self._matrix.format, self._bytes(part))
        if part.start % own.columns or part.stop % own.columns:
            raise ValueError(
                f"{self.name} is in {self._matrix.format}, whose blocks of {own.columns} columns this number of ranks "
                f"would cut (columns {part.start} to {part.stop}): choose another tp, or set dequantize"
            )
        columns = slice(part.start // own.columns * own.bytes, part.stop // own.columns * own.bytes)
        return read_blocks(self._matrix.format, self._bytes(range(self.shape[0]))[:, columns])

    def dense(self, dim: int, part: range) -> torch.Tensor:
        """The weights of that part, float32."""
        whole = BlockProduct(BlockWeight.of(self.blocks(0, part if dim == 0 else range(self.shape[0])))).dense()
        return whole if dim == 0 else whole[:, part.start : part.stop]

    def _bytes(self, part: range) -> torch.Tensor:
        rows = slice(part.start, part.stop) if self._order is None else self._order[part.start : part.stop]
        return torch.from_numpy(np.array(self._rows[rows]))


def has_gguf(folder: Path) -> bool:
    """Whether a folder refers to a GGUF file."""
    return (folder / INDEX).exists()


def matrices(folder: Path) -> Iterator[GGUFMatrix]:
    """The matrices of the GGUF file that a folder refers to. Raises ValueError if the file is not there, or is shorter
    than it was."""
    index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
    orders = [np.array(order) for order in index.orders]
    try:
        file = np.memmap(folder / FILE, dtype=np.uint8, mode="r")
        for name, matrix in index.matrices.items():
            yield GGUFMatrix(name, matrix, file, None if matrix.order is None else orders[matrix.order])
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / FILE} cannot be read: {error}") from error
