"""The number of rows that a step computes.

On a GPU short steps are CUDA graphs of certain sizes, and a step is padded to the next size
(`worker.executor.cuda_graphs`). On a CPU rows are the tokens. That also holds for long steps, although they may be
padded (`worker.executor.piecewise_graphs`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from pipeline.shape import BatchShape

# Largest step that is a CUDA graph. A larger step computes for longer than its kernels take to launch one by one, and
# then they may be faster kernels: on an H200 a step of 385 tokens of an 8B model took 16.8 ms as a graph, 15.9 ms
# without.
MAX_GRAPH_TOKENS = 256


def decode_sizes(most: int) -> list[int]:
    """Graph sizes for decodes, up to `most`: closer together for short steps, of which padding is a larger part."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32)]
    return [size for size in sizes if size < most] + [most]


def token_sizes(most: int) -> list[int]:
    """Graph sizes in tokens, up to `most`. From about 200 tokens on, every further token costs the same."""
    sizes = [*range(16, 256, 16), *range(256, 512, 32), *range(512, most, 64)]
    return [size for size in sizes if size < most] + [most]


def mixed_sizes(least: int, most: int) -> list[int]:
    """Token counts above `least` up to `most`, four for each doubling: the sizes that long steps run as piecewise
    graphs are padded to."""
    sizes: list[int] = []
    size = least
    while size < most:
        size = min(size + (max(1, least // 4) << len(sizes) // 4), most)
        sizes.append(size)
    return sizes


class PaddedSizes:
    """Rows of a step by its tokens."""

    def __init__(self, decodes: Sequence[int] = (), mixed: Sequence[int] = ()) -> None:
        """Graph sizes, ascending: `decodes` for steps of decodes alone, `mixed` for steps with chunks of more than one
        token."""
        self._decodes, self._mixed = _table(decodes), _table(mixed)
        self._sizes = list(mixed)

    @classmethod
    def of_graphs(cls, max_running: int, token_budget: int) -> "PaddedSizes":
        """The sizes on a GPU with `max_running` slots and at most `token_budget` tokens in a step."""
        return cls(decode_sizes(max_running), token_sizes(min(MAX_GRAPH_TOKENS, token_budget)))

    def padded(self, shape: BatchShape) -> int:
        """Rows of a step."""
        n, table = shape.tokens, self._mixed if shape.chunks else self._decodes
        return table[n] if n < len(table) else n

    def mixed(self, tokens: int) -> int:
        """Rows of a step with chunks of more than one token."""
        return self._mixed[tokens] if tokens < len(self._mixed) else tokens

    def room(self, shape: BatchShape) -> int | None:
        """The most tokens with logits that can be added to the chunks of a step that is a CUDA graph, so that it stays
        one; None for any other step. A graph has at most as many logits as the largest of `decodes`."""
        if shape.tokens >= len(self._mixed if shape.chunks else self._decodes):
            return None
        most_logits = len(self._decodes) - 1 - shape.decodes - shape.chunks
        return max(0, min(len(self._mixed) - 1 - shape.tokens, most_logits))

    def whole(self, tokens: int) -> int:
        """The most tokens, up to `tokens`, that a step with chunks can have without padding; 0 if there are none."""
        if tokens >= len(self._mixed):
            return tokens
        return self._sizes[i - 1] if (i := bisect_right(self._sizes, tokens)) else 0


def _table(sizes: Sequence[int]) -> list[int]:
    """The next size for each number of tokens."""
    return [0, *(sizes[bisect_left(sizes, n)] for n in range(1, sizes[-1] + 1))] if sizes else []


UNPADDED = PaddedSizes()
