"""Attention of single tokens as one stream against the definition, and how the stream is cut."""

import numpy as np
import pytest
import torch

from kernels.attention import AttentionBatch, AttentionShape, flat_pages
from kernels.reference import ReferenceAttention
from tests.kernels.test_ranges import DEVICE, ON_GPU, TOLERANCES

pytest.importorskip("triton")

from kernels import stream_attention
from kernels.stream_attention import TILE_KEYS, StreamAttention

PLAIN = AttentionShape(4, 2, 64, 0.125, (None,))


def decodes(contexts: list[int], page_size: int) -> tuple[AttentionBatch, int]:
    """A batch of single tokens, and how many pages it has, all in any order."""
    counts = [-(-context // page_size) for context in contexts]
    free = iter(np.random.default_rng(5).permutation(sum(counts)).astype(np.int32))
    tables = np.full((len(contexts), max(counts)), 1 << 30, dtype=np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [next(free) for _ in range(count)]
    starts = np.array(contexts, dtype=np.int32) - 1
    return AttentionBatch(tables, np.arange(len(contexts), dtype=np.int32), starts, np.ones_like(starts)), sum(counts)


def stream(shape: AttentionShape, kv: torch.Tensor, n: int, programs: int) -> StreamAttention:
    return StreamAttention(kv, shape, n, -(-programs * shape.num_kv_heads // stream_attention._PROGRAMS))


@pytest.mark.parametrize(
    ("shape", "page_size"),
    [
        (PLAIN, 16),
        (PLAIN, 1),
        (AttentionShape(6, 2, 64, 0.2, (None, None)), 64),
        (AttentionShape(8, 1, 128, 0.1, (None,)), 8),
        (AttentionShape(2, 2, 64, 0.3, (None,)), 4),
    ],
)
@pytest.mark.parametrize(
    "contexts",
    [[1], [400], [17, 16, 15, 1], [300, 2, 33, 160, 1, 1, 90], [5] * 20],
)
def test_same_as_reference(shape: AttentionShape, page_size: int, contexts: list[int]) -> None:
    """Twice: what counts the parts that are there is zero again."""
    batch, num_pages = decodes(contexts, page_size)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    torch.manual_seed(1)
    kv = torch.randn(len(shape.windows), 2, num_pages + 1, shape.num_kv_heads, page_size, shape.head_dim, dtype=dtype)
    # Beyond the contexts, and on the page that is nobody's, stands what spoils whatever reads it.
    for row, context in enumerate(contexts):
        if context % page_size:
            kv[:, :, batch.tables[row, context // page_size], :, context % page_size :] = float("nan")
    expected = ReferenceAttention(kv.clone(), shape)
    expected.plan(batch)
    tested = stream(shape, kv.to(DEVICE), len(contexts), 7)
    held = np.array(contexts)
    work = tested.work(held)
    shares, sequences = (torch.from_numpy(array).to(DEVICE) for array in work)
    pages = flat_pages(batch.tables, batch.rows, -(-held // page_size))
    for layer in (*range(len(shape.windows)), 0):
        q = torch.randn(len(contexts), shape.num_heads, shape.head_dim, dtype=dtype)
        got = torch.full_like(q, float("nan")).to(DEVICE)
        tested.attend_into(layer, q.to(DEVICE), got, shares, sequences, torch.from_numpy(pages).to(DEVICE))
        wanted = expected.attend(layer, q)
        torch.testing.assert_close(got.cpu(), wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("seed", range(20))
def test_work_is_cut_evenly(seed: int) -> None:
    """Every tile has one program, none has nothing but those beyond the last, and each has about as much as any."""
    generator = np.random.default_rng(seed)
    contexts = generator.integers(1, int(generator.choice([20, 200, 3000])), int(generator.integers(1, 300)))
    programs = int(generator.choice([1, 5, 64, 792]))
    tested = stream(PLAIN, torch.empty(1, 2, 1, 2, 16, 64), len(contexts), programs)
    shares, sequences = tested.work(contexts)
    assert len(shares) == tested.programs >= programs
    sizes = shares[:, 1] - shares[:, 0]
    used = int((sizes > 0).sum())
    assert (sizes[:used] > 0).all() and not sizes[used:].any()
    assert shares[0, 0] == 0 and (shares[1:used, 0] == shares[: used - 1, 1]).all()
    tiles = -(-contexts // TILE_KEYS)
    own = sequences[:-1]
    assert (own[:, 1] - own[:, 0] == tiles).all() and own[-1, 1] == shares[used - 1, 1] == tiles.sum()
    for program, (first, end, sequence) in enumerate(shares[:used]):
        assert own[sequence, 0] <= first < own[sequence, 1]
        has = (own[:, 0] < end) & (own[:, 1] > first)
        assert ((own[:, 4] <= program) & (program <= own[:, 5]) == has).all()
    begun = np.array([((own[:, 0] < end) & (own[:, 1] > first)).sum() for first, end, _ in shares[:used]])
    costs = sizes[:used] + stream_attention._BEGIN_TILES * begun
    assert costs.max() - costs.min() <= 3 * stream_attention._BEGIN_TILES + 2


@pytest.mark.parametrize(
    ("shape", "dtype", "can"),
    [
        (PLAIN, torch.bfloat16, True),
        (PLAIN, torch.float32, False),
        (AttentionShape(34, 2, 64, 1.0, (None,)), torch.float16, False),
        (AttentionShape(4, 2, 80, 1.0, (None,)), torch.float16, False),
        (AttentionShape(4, 2, 64, 1.0, (None, 128)), torch.float16, False),
        (AttentionShape(4, 2, 64, 1.0, (None,), softcap=5.0), torch.float16, False),
    ],
)
def test_what_it_is_made_for(shape: AttentionShape, dtype: torch.dtype, can: bool) -> None:
    assert stream_attention.can_run(shape, dtype) is can
