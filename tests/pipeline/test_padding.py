"""Rows that steps compute, and the sizes of graphs that they are padded to."""

import itertools

import pytest

from pipeline.padding import MAX_GRAPH_TOKENS, UNPADDED, PaddedSizes, decode_sizes, mixed_sizes, token_sizes
from pipeline.shape import BatchShape


def test_ladders():
    """They end at the most that there may be; no step pays for many more than it has."""
    for most in (1, 2, 7, 64, 100, 256, 500, 512):
        sizes = decode_sizes(most)
        assert sizes[0] == 1 and sizes[-1] == most and sizes == sorted(set(sizes))
        assert all(b - a <= max(8, a / 4) for a, b in itertools.pairwise(sizes))
        sizes = token_sizes(most)
        assert sizes[-1] == most and sizes == sorted(set(sizes))
        assert all(b - a <= max(16, a / 8) for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("token_budget", [100, 8192])
def test_a_step_has_the_rows_of_the_next_graph(token_budget):
    rows = PaddedSizes.of_graphs(512, token_budget)
    graphs = token_sizes(min(MAX_GRAPH_TOKENS, token_budget))
    for n in (1, 2, 3, 61, 64, 65, 80, 81, 256, 257, 512):
        assert rows.padded(BatchShape([(700, 1)] * n)) == min(size for size in decode_sizes(512) if size >= n)
    for n in (2, 16, 17, 99, 100, 101, 130, 256, 257, 300, 511, 513, 600):
        assert (
            rows.padded(BatchShape([(0, n)])) == rows.mixed(n) == min([size for size in graphs if size >= n], default=n)
        )
        below = [size for size in graphs if size <= n] if n <= graphs[-1] else [n]
        assert rows.whole(n) == max(below, default=0)
    assert rows.padded(BatchShape()) == rows.whole(0) == 0


def test_nothing_is_padded_without_graphs():
    for n in (1, 3, 65, 257):
        shape = BatchShape([(50, 1)] * n)
        assert UNPADDED.padded(shape) == UNPADDED.mixed(n) == UNPADDED.whole(n) == n


def test_sizes_of_pieces() -> None:
    assert mixed_sizes(256, 700) == [320, 384, 448, 512, 640, 700]
    assert mixed_sizes(16, 16) == [] and mixed_sizes(1, 9) == [2, 3, 4, 5, 7, 9]
