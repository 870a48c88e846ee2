"""A micro-batch as cost models see it: a few sums over its chunks.

Every chunk of one token counts as a decode here, even the last token of a prompt.
"""

from collections.abc import Iterable

TILE = 128  # rows of a tile of a matrix product
KNOTS = (0, 64, 128, 256, 512, 1024)  # rows at which the cost of one more row may grow
# With this number of rows, a large matrix product has about as many tiles as a GPU has multiprocessors, or a multiple.
# On an H200 (132 multiprocessors) a row of Llama-70B's products took 11% longer in steps of 384 and of 896 rows than in
# multiples of `WAVE`, and 3% longer in steps of 768.
WAVE = 4 * TILE
TILED_FROM = 2 * TILE  # rows up to which products are bound by memory, and further rows are free
FEATURES = (
    "constant",
    "several",
    "mixed",
    *(f"rows_above_{knot}" for knot in KNOTS),
    "unused_rows",
    "decodes",
    "decode_context",
    "chunks",
    "prefixes",
    "prefix_products",
    "squares",
)


class BatchShape:
    """The sums over a batch's chunks on which its cost depends. Adding or removing a chunk is O(1)."""

    __slots__ = ("chunks", "decode_context", "decodes", "prefix_products", "prefixes", "squares", "tokens")

    def __init__(self, chunks: Iterable[tuple[int, int]] = ()) -> None:
        """`chunks`: start (tokens before the chunk) and length of each."""
        self.tokens = 0
        self.decodes = 0
        self.decode_context = 0
        self.chunks = 0
        self.prefixes = 0
        self.prefix_products = 0
        self.squares = 0
        for start, length in chunks:
            self.add(start, length)

    @classmethod
    def decoding(cls, decodes: int, context: int) -> "BatchShape":
        """`decodes` decodes alone, which attend to `context` tokens in sum, their own included."""
        shape = cls()
        shape.tokens = shape.decodes = decodes
        shape.decode_context = context
        return shape

    def add(self, start: int, length: int) -> None:
        self.tokens += length
        if length == 1:
            self.decodes += 1
            self.decode_context += start + 1
        else:
            self.chunks += 1
            self.prefixes += start
            self.prefix_products += start * length
            self.squares += length * length

    def remove(self, start: int, length: int) -> None:
        """Undoes `add`."""
        self.tokens -= length
        if length == 1:
            self.decodes -= 1
            self.decode_context -= start + 1
        else:
            self.chunks -= 1
            self.prefixes -= start
            self.prefix_products -= start * length
            self.squares -= length * length

    def copy(self) -> "BatchShape":
        other = BatchShape()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def __repr__(self) -> str:
        return f"BatchShape({self.tokens} tokens, {self.decodes} decodes, {self.chunks} chunks)"


def in_tiles(tokens: int, up: bool) -> int:
    """`tokens` rounded up or down to whole tiles."""
    return -(-tokens // TILE) * TILE if up else tokens // TILE * TILE


def unused_rows(rows: int) -> int:
    """Rows of the last tile that are not used; 0 where products are bound by memory."""
    return in_tiles(rows, up=True) - rows if rows > TILED_FROM else 0


def features(shape: BatchShape, rows: int) -> list[float]:
    """The values of `FEATURES` for a step that computes `rows` rows."""
    return [
        1.0,
        1.0 if shape.tokens > 1 else 0.0,
        1.0 if shape.chunks else 0.0,
        *(float(max(0, rows - knot)) for knot in KNOTS),
        float(unused_rows(rows)),
        float(shape.decodes),
        float(shape.decode_context),
        float(shape.chunks),
        float(shape.prefixes),
        float(shape.prefix_products),
        float(shape.squares),
    ]


def typical_shapes() -> list[BatchShape]:
    """Batches that span the range of possible steps: the grid on which a prior is turned into coefficients."""
    shapes = []
    decodes = [(tokens, context) for tokens in (1, 8, 32, 100, 256, 700) for context in (64, 1024, 8192)]
    shapes += [BatchShape([(context, 1)] * tokens) for tokens, context in decodes]
    for tokens in (16, 64, 128, 200, 256, 257, 384, 385, 450, 512, 520, 640, 650, 768, 1000, 1024, 1030, 2048, 4100):
        shapes += [BatchShape([(start, tokens)]) for start in (0, 4096, 16384)]
        shapes += [BatchShape([*[(2000, 1)] * 32, (start, tokens)]) for start in (1024, 8192)]
        shapes.append(BatchShape([*[(6000, 1)] * 64, *[(1000, tokens // 4)] * 4]))
    return shapes
