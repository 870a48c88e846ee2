"""Attention over two kinds of pages, next to that of one backend whose layers all keep all tokens."""

import numpy as np
import pytest
import torch

from kernels.attention.interface import AttentionBackend, AttentionBatch, AttentionShape
from kernels.attention.torch_backend import TorchAttention
from kernels.attention.window_pages import WindowPagesAttention, of_windows

PAGE_SIZE, WINDOW = 4, 6
SHAPE = AttentionShape(4, 2, 8, 0.3, (WINDOW, None, WINDOW, WINDOW, None))
STARTS, LENGTHS = [0, 5, 17, 30], [1, 1, 9, 21]


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def pages(layers: int, count: int, value: float = float("nan")) -> torch.Tensor:
    return torch.full((layers, 2, count, SHAPE.num_kv_heads, PAGE_SIZE, SHAPE.head_dim), value)


def copy_page(to: torch.Tensor, page: int, source: torch.Tensor, layers: list[int], source_page: int) -> None:
    for layer, own in enumerate(layers):
        to[layer, :, page] = source[own, :, source_page]


def test_layers_with_a_window_need_its_pages_alone():
    """All other pages are no numbers, and their entries in the tables are page 0."""
    rng, counts = (
        np.random.default_rng(0),
        [-(-(start + length) // PAGE_SIZE) for start, length in zip(STARTS, LENGTHS, strict=True)],
    )
    tables = rng.permutation(64).astype(np.int32).reshape(4, 16)
    batch = AttentionBatch(tables, np.arange(4, dtype=np.int32), int32(STARTS), int32(LENGTHS))
    plain = TorchAttention(torch.randn(pages(5, 64).shape), SHAPE)
    of_windows_only, windowed = of_windows(SHAPE, True)
    of_all, full = of_windows(SHAPE, False)
    assert (windowed, full) == ([0, 2, 3], [1, 4])
    kv, window_kv, window_tables, free = pages(2, 64), pages(3, 40), np.zeros_like(tables), iter(range(1, 40))
    for row, (start, count) in enumerate(zip(STARTS, counts, strict=True)):
        for index in range(count):
            copy_page(kv, tables[row, index], plain.kv, full, tables[row, index])
            if index >= max(0, start - WINDOW + 1) // PAGE_SIZE:
                window_tables[row, index] = next(free)
                copy_page(window_kv, window_tables[row, index], plain.kv, windowed, tables[row, index])
    both = WindowPagesAttention(SHAPE, TorchAttention(kv, of_all), TorchAttention(window_kv, of_windows_only))
    plain.plan(batch)
    both.plan(AttentionBatch(tables, batch.rows, batch.starts, batch.lengths, window_tables))
    for layer in range(5):
        q = torch.randn(sum(LENGTHS), SHAPE.num_heads, SHAPE.head_dim)
        k, v = (torch.randn(sum(LENGTHS), SHAPE.num_kv_heads, SHAPE.head_dim) for _ in range(2))
        torch.testing.assert_close(both.run(layer, q, k, v), plain.run(layer, q, k, v))
        slots, own = both.place(layer)
        rows = own[0].flatten(0, 2)[slots]
        torch.testing.assert_close(rows, k[:, 0])


@pytest.mark.parametrize("windows", [(WINDOW, WINDOW), (None, None)])
def test_a_stage_may_have_layers_of_one_kind(windows: tuple[int | None, ...]):
    shape = AttentionShape(4, 2, 8, 0.3, windows)
    pool: AttentionBackend = TorchAttention(pages(2, 8, 0.0), shape)
    both = WindowPagesAttention(shape, *((None, pool) if windows[0] else (pool, None)))
    assert both.pools == [pool] and both.layout == ((0, 0), (0, 1))
    with pytest.raises(ValueError, match="need a backend each"):
        WindowPagesAttention(shape, *((pool, None) if windows[0] else (None, pool)))
