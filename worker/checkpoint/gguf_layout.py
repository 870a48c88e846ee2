"""Where the quantized matrices of a GGUF file stand: what `gguf.json` of a model's folder says.

Imports nothing heavy, since the command line reads it, too.
"""

import msgspec

FILE, INDEX = "model.gguf", "gguf.json"


class Matrix(msgspec.Struct, frozen=True):
    """A matrix of the file.

    | field | meaning |
    | --- | --- |
    | `format` | ggml's name, as in `kernels.linear.ggml_blocks.FORMATS` |
    | `shape` | rows and columns |
    | `offset` | where it begins in the file, in bytes |
    | `order` | which of `Index.orders` has, for each of the model's rows, the row in the file; None: the same row |
    """

    format: str
    shape: tuple[int, int]
    offset: int
    order: int | None = None


class Index(msgspec.Struct, frozen=True):
    """The content of `gguf.json`. `matrices`: by Hugging Face's names."""

    matrices: dict[str, Matrix]
    orders: list[list[int]]
