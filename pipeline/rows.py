"""How many rows a step computes. On a GPU short steps are graphs of certain sizes, padded to the next
(`worker.graphs`); on a CPU rows are tokens, and long steps, which may be padded too (`worker.pieces`), count so."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from pipeline.shape import BatchShape

# Tokens of a step from which on what it computes takes longer than to start its kernels one by one, which may then be
# faster ones: on an H200 a step of 385 tokens of an 8B model took 16.8 ms as a graph, 15.9 ms without.
MOST_TOKENS = 256


def ladder(most: int) -> list[int]:
    """Numbers of decodes up to `most`, closer together where a step is short and padding costs more of it."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [size for size in sizes if size < most] + [most]


def token_ladder(most: int) -> list[int]:
    """Numbers of tokens up to `most`. From some 200 on each more costs as much as any other."""
    sizes = [*range(16, 256, 16), *range(256, 512, 32), *range(512, most, 64)]
    return [size for size in sizes if size < most] + [most]


def quarters(least: int, most: int) -> list[int]:
    """Numbers of tokens above `least` up to `most`, four to each doubling: what long steps in pieces are padded to."""
    sizes: list[int] = []
    size = least
    while size < most:
        size = min(size + (max(1, least // 4) << len(sizes) // 4), most)
        sizes.append(size)
    return sizes


class Rows:
    """The rows of steps by their tokens."""

    def __init__(self, decodes: Sequence[int] = (), mixed: Sequence[int] = ()) -> None:
        """The sizes of graphs, growing: for decodes alone, and for steps with chunks of more than one token."""
        self._decodes, self._mixed = _table(decodes), _table(mixed)
        self._sizes = list(mixed)

    @classmethod
    def of_graphs(cls, max_running: int, token_budget: int) -> "Rows":
        """Those of a GPU with so many slots for sequences, and so many tokens in a step at most."""
        return cls(ladder(max_running), token_ladder(min(MOST_TOKENS, token_budget)))

    def of(self, shape: BatchShape) -> int:
        """Those of a step."""
        n, table = shape.tokens, self._mixed if shape.chunks else self._decodes
        return table[n] if n < len(table) else n

    def mixed(self, tokens: int) -> int:
        """Those of a step that is not decodes alone."""
        return self._mixed[tokens] if tokens < len(self._mixed) else tokens

    def whole(self, tokens: int) -> int:
        """The most tokens, up to `tokens`, of a step that is not decodes alone and has no rows for nothing; 0 where
        there are none."""
        if tokens >= len(self._mixed):
            return tokens
        return self._sizes[i - 1] if (i := bisect_right(self._sizes, tokens)) else 0


def _table(sizes: Sequence[int]) -> list[int]:
    """For each number of tokens the next size."""
    return [0, *(sizes[bisect_left(sizes, n)] for n in range(1, sizes[-1] + 1))] if sizes else []


UNPADDED = Rows()
