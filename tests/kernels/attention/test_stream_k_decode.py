"""Attention of single tokens as streams against the definition, and how streams are cut."""

import numpy as np
import pytest
import torch

from kernels.attention.interface import AttentionBatch, AttentionShape, SharedPrefixes
from tests.kernels.attention.batches import GROUPS, all_shared, decodes, grouped
from tests.kernels.device import DEVICE, DTYPE
from tests.kernels.reference import TOLERANCES, ReferenceAttention

pytest.importorskip("triton")

from kernels.attention import shared_prefix, stream_k_decode
from kernels.attention.shared_prefix import SharedPrefixFinder
from kernels.attention.stream_k_decode import StreamKAttention
from kernels.host_device import all_to_device

PLAIN = AttentionShape(4, 2, 64, 0.125, (None,))
OWN, SHARED = stream_k_decode._OWN, stream_k_decode._SHARED


def check(
    batch: AttentionBatch,
    num_pages: int,
    page_size: int,
    shape: AttentionShape,
    shared: SharedPrefixes | None,
    padding: int | None,
) -> None:
    """Of a step, or of a graph that is padded so. Twice the same layer: what counts parts that are there is zero
    again."""
    n = len(batch.rows)
    torch.manual_seed(1)
    size = len(shape.windows), 2, num_pages + 1, shape.num_kv_heads, page_size, shape.head_dim
    kv = torch.randn(*size, dtype=DTYPE)
    # Beyond the contexts, and on pages that are nobody's, stands what spoils whatever reads it.
    for row, context in zip(batch.rows, batch.starts + 1, strict=True):
        if context % page_size:
            kv[:, :, batch.tables[row, context // page_size], :, context % page_size :] = float("nan")
    expected = ReferenceAttention(kv.clone(), shape)
    expected.plan(batch)
    tested = StreamKAttention(kv.to(DEVICE), shape, n + 3, 4 * num_pages, 4)
    work = tested.work(batch, shared, padding or 0)
    if padding is None:
        arrays = all_to_device(tested.arrays(work), DEVICE)
    else:
        rows, arrays = tested.fill(work, np.arange(n + padding))
        assert rows.tolist() == list(range(n + padding))
    for layer in (*range(len(shape.windows)), 0):
        q = torch.randn(n + (padding or 0), shape.num_heads, shape.head_dim, dtype=DTYPE)
        got = torch.full_like(q, float("nan")).to(DEVICE)
        tested.attend_into(arrays, layer, q.to(DEVICE), got)
        wanted = expected.attend(layer, q[:n])
        torch.testing.assert_close(got[:n].cpu(), wanted, atol=TOLERANCES[DTYPE], rtol=TOLERANCES[DTYPE])


@pytest.mark.slow
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
@pytest.mark.parametrize("contexts", [[1], [200], [130, 2, 33, 1, 1, 70], [5] * 20])
def test_same_as_reference(shape: AttentionShape, page_size: int, contexts: list[int]) -> None:
    batch, num_pages = decodes(contexts, page_size)
    check(batch, num_pages, page_size, shape, None, 2 if len(contexts) == 1 else None)


@pytest.mark.parametrize(
    ("shape", "page_size", "padding"),
    [
        (PLAIN, 16, None),
        (AttentionShape(3, 1, 64, 0.2, (None,)), 4, 3),
        (AttentionShape(16, 1, 64, 0.1, (None,)), 16, 3),
    ],
)
def test_shared_prefixes(
    shape: AttentionShape, page_size: int, padding: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of several blocks, and of parts of one; sequences that share nothing."""
    monkeypatch.setattr(shared_prefix, "_STARTS_BYTES", 0)
    monkeypatch.setattr(shared_prefix, "_FLOAT32_BYTES", 0)
    batch, num_pages = grouped(GROUPS, page_size)
    shared = SharedPrefixFinder(page_size, shape, DTYPE.itemsize).find(batch)
    assert shared is not None and len(shared.num_pages) == 3
    check(batch, num_pages, page_size, shape, shared, padding)


def test_nothing_is_shared() -> None:
    """As a graph is captured."""
    batch, num_pages = decodes([30, 200], 16)
    check(batch, num_pages, 16, PLAIN, SharedPrefixes.none(), 1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [OWN, SHARED])
def test_cuts_are_even(seed: int, kind: stream_k_decode._StreamConfig) -> None:
    """Every tile has one program, none has nothing but those beyond the last, and each has about as much as any."""
    generator = np.random.default_rng(seed)
    keys = generator.integers(1, int(generator.choice([20, 200, 3000])), int(generator.integers(1, 300)))
    most = int(generator.choice([1, 5, 64, 792]))
    columns = np.zeros((len(keys), stream_k_decode._BLOCK_FIELDS), dtype=np.int32)
    columns[:, stream_k_decode._KEYS] = keys
    shares, blocks = stream_k_decode._cut(columns, kind, most)
    assert len(shares) == most
    sizes = shares[:, 1] - shares[:, 0]
    used = int((sizes > 0).sum())
    assert (sizes[:used] > 0).all() and not sizes[used:].any()
    assert shares[0, 0] == 0 and (shares[1:used, 0] == shares[: used - 1, 1]).all()
    tiles = -(-keys // kind.keys)
    own = blocks[:-1]
    assert (own[:, 1] - own[:, 0] == tiles).all() and own[-1, 1] == shares[used - 1, 1] == tiles.sum()
    begun = []
    for program, (first, end, block) in enumerate(shares[:used]):
        assert own[block, 0] <= first < own[block, 1]
        has = (own[:, 0] < end) & (own[:, 1] > first)
        assert ((own[:, 4] <= program) & (program <= own[:, 5]) == has).all()
        begun.append(has.sum())
    costs = sizes[:used] + kind.begin * np.array(begun)
    assert costs.max() - costs.min() <= 3 * kind.begin + 2


@pytest.mark.parametrize("size", [2, 3, 40])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_room_for_parts(size: int, group: int) -> None:
    """However many groups there are, what their programs leave has room."""
    batch, num_pages = grouped([(32, [1] * size)] * (40 // size), 16)
    n = len(batch.rows)
    shape = AttentionShape(group, 1, 64, 1.0, (None,))
    tested = StreamKAttention(torch.empty(1, 2, num_pages + 1, 1, 16, 64), shape, n, num_pages, 1)
    work = tested.work(batch, all_shared(batch, 16))
    assert work.shared is not None
    for stream, parts in ((work.own, tested._own_parts), (work.shared, tested._shared_parts)):
        blocks = stream.blocks[:-1]
        assert (blocks[:, 5] + np.arange(len(blocks))).max() < len(parts[0])
    tested.fill(work, np.arange(n))


def test_empty_plan_is_copied_once() -> None:
    """And again after another plan: the tensors hold what a step without sequences would have filled them with."""
    batch, num_pages = decodes([20, 40], 16)
    tested = StreamKAttention(torch.empty(1, 2, num_pages + 1, 2, 16, 64), PLAIN, 2, num_pages, 4)
    nothing, none = tested.work(batch.part(0, 0), None), np.zeros(0, dtype=np.int64)
    wanted = [array.clone() for array in tested.fill(nothing, none)[1]]
    for _ in range(2):
        _, filled = tested.fill(tested.work(batch, None), np.arange(2))
        assert not torch.equal(filled[0], wanted[0])
        for _ in range(2):
            got = tested.fill_empty()
            assert all(torch.equal(mine[: len(its)], its) for mine, its in zip(got[:2], wanted[:2], strict=True))


@pytest.mark.parametrize(
    ("shape", "dtype", "can"),
    [
        (PLAIN, torch.bfloat16, True),
        (PLAIN, torch.float32, False),
        (AttentionShape(34, 2, 64, 1.0, (None,)), torch.float16, False),
        (AttentionShape(4, 2, 80, 1.0, (None,)), torch.float16, False),
        (AttentionShape(4, 2, 64, 1.0, (None, 128)), torch.float16, False),
        (AttentionShape(4, 2, 64, 1.0, (None,), softcap=5.0), torch.float16, False),
        (AttentionShape(4, 2, 64, 1.0, (None,), has_sinks=True), torch.float16, False),
    ],
)
def test_what_it_is_made_for(shape: AttentionShape, dtype: torch.dtype, can: bool) -> None:
    assert stream_k_decode.can_run(shape, dtype) is can
