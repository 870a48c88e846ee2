"""Attention over two kinds of pages, next to that of one backend whose layers all keep all tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention.interface import AttentionBackend, AttentionBatch, AttentionShape
from kernels.attention.torch_backend import TorchAttention
from kernels.attention.window_pages import WindowPagesAttention, of_windows
from worker.executor.attention_selector import AttentionChoice, AttentionLimits, build_attention

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


@pytest.mark.parametrize("name", ["torch", "numba", "triton"])
def test_layers_that_attend_within_chunks(name: str):
    """Chunks of 8 tokens: steps that begin, end and go on in the midst of one, and one that ends with a single token of
    the next."""
    rng, size, starts, lengths = np.random.default_rng(0), 8, [8, 5, 0, 17, 30, 7], [1, 1, 3, 8, 20, 2]
    tables = rng.permutation(96).astype(np.int32).reshape(6, 16)
    batch = AttentionBatch(tables, np.arange(6, dtype=np.int32), int32(starts), int32(lengths))
    shape = replace(SHAPE, windows=(None, size), in_chunks=True)
    made = []
    for has_window in (False, True):
        kv = torch.randn(1, 2, 97, SHAPE.num_kv_heads, PAGE_SIZE, SHAPE.head_dim)
        limits = AttentionLimits(8, 200, 64)
        made.append(build_attention(AttentionChoice(name), kv, of_windows(shape, has_window)[0], limits))
    both = WindowPagesAttention(shape, *made)
    both.plan(batch)
    n = sum(lengths)
    q = torch.randn(n, SHAPE.num_heads, SHAPE.head_dim)
    k, v = (torch.randn(n, SHAPE.num_kv_heads, SHAPE.head_dim) for _ in range(2))
    got, (keys, values) = both.run(1, q, k, v), both.place(1)[1]
    at = 0
    for table, start, length in zip(tables, starts, lengths, strict=True):
        for position in range(start, start + length):
            seen = range(position // size * size, position + 1)
            rows = [(table[one // PAGE_SIZE], one % PAGE_SIZE) for one in seen]
            own_k, own_v = (torch.stack([kv[page, :, place] for page, place in rows], 1) for kv in (keys, values))
            scores = (q[at].unflatten(0, (2, 2)) @ own_k.transpose(1, 2)) * SHAPE.scale
            wanted = (scores.softmax(-1) @ own_v).flatten(0, 1)
            torch.testing.assert_close(got[at], wanted, atol=1e-5, rtol=1e-5)
            at += 1


def test_chunks_are_whole_pages():
    shape = replace(SHAPE, windows=(6,), in_chunks=True)
    pool = TorchAttention(pages(1, 8, 0.0), of_windows(shape, True)[0])
    with pytest.raises(ValueError, match="page_size 4 does not divide the model's attention chunk, 6"):
        WindowPagesAttention(shape, None, pool)


@pytest.mark.parametrize("windows", [(WINDOW, WINDOW), (None, None)])
def test_a_stage_may_have_layers_of_one_kind(windows: tuple[int | None, ...]):
    shape = AttentionShape(4, 2, 8, 0.3, windows)
    pool: AttentionBackend = TorchAttention(pages(2, 8, 0.0), shape)
    both = WindowPagesAttention(shape, *((None, pool) if windows[0] else (pool, None)))
    assert both.pools == [pool] and both.layout == ((0, 0), (0, 1))
    with pytest.raises(ValueError, match="need a backend each"):
        WindowPagesAttention(shape, *((pool, None) if windows[0] else (None, pool)))
