"""The GPU's draw, run on the CPU, against the CPU's: both take the same tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.sampling import topk_topp
from worker.sampling.topk_topp_cpu import draw, uniform


def filters_of(rows: list[tuple[int, float, float]], vocab: int) -> topk_topp.Filters:
    top_k = torch.tensor([min(k, vocab) or vocab for k, _, _ in rows], dtype=torch.int32)
    top_p, min_p = (torch.tensor([row[i] for row in rows], dtype=torch.float32) for i in (1, 2))
    return topk_topp.Filters(
        top_k if (top_k < vocab).any() else None,
        top_p if (top_p < 1).any() else None,
        min_p if (min_p > 0).any() else None,
    )


rows = st.tuples(
    st.sampled_from([0, 0, 1, 3, 64, 10_000]),
    st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
    st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0]),
)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 63, 511, 512, 513, 3000]),
    sharpness=st.sampled_from([0.5, 2.0, 8.0]),
    batch=st.lists(rows, min_size=1, max_size=6),
)
def test_draws_what_the_cpu_draws(seed, vocab, sharpness, batch):
    logits = torch.randn(len(batch), vocab, generator=torch.Generator().manual_seed(seed)) * sharpness
    probs = torch.softmax(logits, dim=1)
    seeds = np.arange(len(batch), dtype=np.uint64) + np.uint64(seed)
    uniforms = uniform(seeds, np.zeros(len(batch), dtype=np.uint64))
    top_k, top_p, min_p = (np.array(column) for column in zip(*batch, strict=True))
    expected = draw(probs.numpy(), top_k, top_p, min_p, uniforms)
    got = topk_topp.draw(probs, filters_of(batch, vocab), torch.from_numpy(uniforms)).numpy()
    for i in np.flatnonzero(got != expected):
        # Only where rounding decides: the uniform number is at a boundary of the kept tokens, or a filter's edge is.
        assert is_at_an_edge(probs[i].double().numpy(), *batch[i], uniforms[i]), (got[i], expected[i])


def is_at_an_edge(probs: np.ndarray, top_k: int, top_p: float, min_p: float, u: float) -> bool:
    ranked = np.sort(probs)[::-1]
    if top_k:
        ranked = ranked[:top_k] / ranked[:top_k].sum()
    mass = np.cumsum(ranked)
    if top_p < 1 and np.abs(mass - top_p).min() < 1e-5:
        return True
    if min_p and np.abs(ranked / ranked[0] - min_p).min() < 1e-5:
        return True
    keep = min(len(ranked), int(np.searchsorted(mass, top_p)) + 1) if top_p < 1 else len(ranked)
    last = np.sort(probs)[::-1][keep - 1]
    if min_p:
        last = max(last, min_p * probs.max())
    kept = np.where(probs >= last * (1 - 1e-9), probs, 0)
    return bool(np.abs(np.cumsum(kept) / kept.sum() - u).min() < 1e-5)


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ((0, 1.0, 0.0), {0, 1, 2, 3}),
        ((2, 0.5, 0.0), {0}),  # top-p first would keep two
        ((3, 0.5, 0.6), {0, 1}),  # min-p before top-p would keep one
        ((0, 0.5, 0.6), {0, 1}),
        ((0, 0.8, 0.6), {0, 1}),
        ((3, 1.0, 0.6), {0, 1}),
        ((1, 0.9, 0.1), {0}),
    ],
)
def test_top_k_applies_before_top_p_and_that_before_min_p(row: tuple[int, float, float], kept: set[int]):
    uniforms = np.linspace(0, 0.99, 100)
    probs = np.array([[0.4, 0.3, 0.2, 0.1]] * 100, dtype=np.float32)
    top_k, top_p, min_p = (np.full(100, limit) for limit in row)
    assert set(draw(probs, top_k, top_p, min_p, uniforms).tolist()) == kept
    filters = filters_of([row] * 100, 4)
    assert set(topk_topp.draw(torch.from_numpy(probs), filters, torch.from_numpy(uniforms)).tolist()) == kept


def test_a_row_that_is_no_number_gets_some_token_and_harms_no_other():
    probs = torch.full((3, 700), 1 / 700)
    probs[1] = torch.nan
    uniforms = torch.tensor([0.5, 0.5, 0.999999999], dtype=torch.float64)
    for asked in (topk_topp.Filters(), filters_of([(3, 0.5, 0.1), (0, 0.9, 0.0), (0, 1.0, 0.0)], 700)):
        first, wrong, last = topk_topp.draw(probs, asked, uniforms).tolist()
        assert 0 <= wrong < 700
        assert last == 699
        assert first == (1 if asked else 350)


@pytest.mark.parametrize("u", [0.0, 0.25, 0.999999, 1 - 2**-53])
def test_a_token_of_weight_0_is_never_drawn(u):
    weights = torch.zeros(1, 1500)
    weights[0, [700, 1100]] = 1.0
    assert topk_topp.invert(weights, torch.tensor([u], dtype=torch.float64)).item() == (700 if u < 0.5 else 1100)


def test_without_flashinfer_there_is_the_sort():
    assert topk_topp._kernels("cpu") is None
