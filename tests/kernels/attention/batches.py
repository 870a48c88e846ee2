"""Batches of attention, random and with prefixes that sequences share, and sinks of its layers."""

import numpy as np
import torch

from kernels.attention.interface import AttentionBatch, AttentionShape, SharedPrefixes

# Chunks as (start, length).
MIXED = [(0, 1), (0, 5), (200, 60), (17, 1), (300, 1), (40, 30), (0, 33), (131, 7), (3, 1), (127, 8), (128, 2)]
# Tokens that a group shares, and what each of its sequences has of its own.
GROUPS = [(48, [1, 3, 20]), (16, [5, 16]), (80, [2, 1, 4, 7, 9, 30, 2, 2, 33]), (0, [1, 40])]


def random_batch(generator: np.random.Generator, chunks: list[tuple[int, int]], page_size: int) -> AttentionBatch:
    """Chunks as (start, length), in shuffled rows and pages; unused entries of the tables point nowhere."""
    ends = [start + length for start, length in chunks]
    pages_of = [-(-end // page_size) for end in ends]
    rows = generator.permutation(len(chunks) + 2)[: len(chunks)].astype(np.int32)
    tables = np.full((len(chunks) + 2, max(pages_of) + 1), 1 << 30, dtype=np.int32)
    pages = iter(generator.permutation(sum(pages_of)))
    for row, count in zip(rows, pages_of, strict=True):
        tables[row, :count] = [next(pages) for _ in range(count)]
    starts, lengths = np.array(chunks, dtype=np.int32).T
    return AttentionBatch(tables, rows, starts.copy(), lengths.copy())


def decodes(contexts: list[int], page_size: int) -> tuple[AttentionBatch, int]:
    """A batch of single tokens, and how many pages it has, all in any order."""
    counts = [-(-context // page_size) for context in contexts]
    free = iter(np.random.default_rng(5).permutation(sum(counts)).astype(np.int32))
    tables = np.full((len(contexts), max(counts)), 1 << 30, dtype=np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [next(free) for _ in range(count)]
    starts = np.array(contexts, dtype=np.int32) - 1
    return AttentionBatch(tables, np.arange(len(contexts), dtype=np.int32), starts, np.ones_like(starts)), sum(counts)


def grouped(groups: list[tuple[int, list[int]]], page_size: int) -> tuple[AttentionBatch, int]:
    """A batch of decodes in shuffled order, rows and pages, and how many pages it has."""
    generator = np.random.default_rng(7)
    counts = [(shared // page_size, -(-own // page_size)) for shared, owns in groups for own in owns]
    num_pages = sum(shared // page_size for shared, _ in groups) + sum(own for _, own in counts)
    free = iter(generator.permutation(num_pages).astype(np.int32))
    n = len(counts)
    rows = generator.permutation(n + 1)[:n].astype(np.int32)
    tables = np.full((n + 1, max(map(sum, counts)) + 2), 1 << 30, dtype=np.int32)
    starts, chunk = np.zeros(n, dtype=np.int32), 0
    for shared, owns in groups:
        prefix = [next(free) for _ in range(shared // page_size)]
        for own in owns:
            pages = prefix + [next(free) for _ in range(-(-own // page_size))]
            tables[rows[chunk], : len(pages)] = pages
            starts[chunk] = len(prefix) * page_size + own - 1
            chunk += 1
    order = generator.permutation(n)
    return AttentionBatch(tables, rows[order], starts[order], np.ones(n, dtype=np.int32)), num_pages


def all_shared(batch: AttentionBatch, page_size: int) -> SharedPrefixes:
    """Of a batch each of whose sequences begins as others do, and has one token more."""
    first_pages = batch.tables[batch.rows, 0]
    members = np.argsort(first_pages, kind="stable").astype(np.int32)
    ends = np.append(np.flatnonzero(np.diff(first_pages[members], prepend=-1)), len(members)).astype(np.int32)
    return SharedPrefixes(members, ends, batch.starts[members[ends[:-1]]] // page_size)


def with_chunk(batch: AttentionBatch) -> AttentionBatch:
    """The first sequence is a chunk instead, of its whole context."""
    order = np.roll(np.arange(len(batch.rows)), -1)
    starts, lengths = batch.starts[order], batch.lengths[order]
    starts[-1], lengths[-1] = 0, starts[-1] + 1
    return AttentionBatch(batch.tables, batch.rows[order], starts, lengths)


def random_sinks(shape: AttentionShape) -> torch.Tensor | None:
    """Sinks of all layers, some far above and far below all scores; None for a shape without."""
    if not shape.has_sinks:
        return None
    sinks = 2 * torch.randn(len(shape.windows), shape.num_heads)
    sinks[0, 0], sinks[-1, -1] = 300.0, -300.0
    return sinks
