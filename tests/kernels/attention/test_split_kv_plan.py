"""How attention is cut into work, for batches whose sequences share what they begin with and longer chunks."""

import numpy as np
import pytest
import torch

from kernels.attention.interface import AttentionShape, SharedPrefixes
from tests.kernels.attention.batches import all_shared, grouped, with_chunk

pytest.importorskip("triton")

from kernels.attention.triton_backend import TritonAttention


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_work_is_bounded(seed: int, kv_heads: int) -> None:
    """However a batch is, its items fit a graph's grid, which is all the room there is for them, and their parts."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, int(generator.choice([3, 10, 60])), int(generator.integers(1, 20)))
    batch, _ = grouped([(16 * int(generator.integers(1, 200)), [1] * int(size)) for size in sizes], 16)
    n = len(batch.rows)
    shared = all_shared(batch, 16)
    shape = AttentionShape(4 * kv_heads, kv_heads, 128, 1.0, (None,))
    tested = TritonAttention(torch.empty(1, 2, 1, kv_heads, 16, 128), shape, n, int(1e5), 4000)
    mixed = with_chunk(batch)
    for planned, together in ((batch, shared), (batch, SharedPrefixes.none()), (mixed, SharedPrefixes.none())):
        size = planned.num_tokens + seed
        if size > 4000:
            continue
        tested.plan_graph(planned, size, together)
        _, works = tested._work(planned, together, seed)
        work = works[None]
        assert len(work.items) <= tested._most_items(size)
        assert len(work.slots) == len(work.counts) == size
        assert work.counts.sum() <= len(tested._part_out)
        if together is shared:
            assert (work.counts[:n] >= 2).all()
