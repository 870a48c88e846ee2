"""Filters and draws against a version that sorts everything and loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.sampling.topk_topp_cpu import draw, uniform


def kept_slowly(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids that the filters keep, by the book."""
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k:
        ranked = ranked[:top_k]
    if top_p < 1:
        total = sum(float(probs[i]) for i in ranked) if top_k else 1.0
        kept, mass = [], 0.0
        for i in ranked:
            kept.append(i)
            mass += float(probs[i])
            if mass >= top_p * total:
                break
        ranked = kept
    if min_p > 0:
        ranked = [i for i in ranked if probs[i] >= min_p * probs[ranked[0]]]
    return sorted(ranked)


def drawn_slowly(probs: np.ndarray, top_k: int, top_p: float, min_p: float, u: float) -> int:
    kept = [i for i in kept_slowly(probs, top_k, top_p, min_p) if probs[i] > 0]
    cumulative = np.cumsum([float(probs[i]) for i in kept])
    place = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return kept[min(place, len(kept) - 1)]


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (exp / exp.sum(axis=-1, keepdims=True)).astype(np.float32)


filters = st.tuples(
    st.sampled_from([0, 0, 1, 2, 3, 10, 64, 65, 1000, 10_000]),
    st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.999999]),
    st.sampled_from([0.0, 0.0, 1e-9, 1e-4, 0.05, 0.5, 1.0]),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 5, 63, 64, 65, 300, 2048, 5000]),
    sharpness=st.sampled_from([0.0, 0.5, 2.0, 5.0, 20.0]),
    rows=st.lists(filters, min_size=1, max_size=6),
    decimals=st.sampled_from([0, 1, 8]),
)
def test_every_row_is_drawn_as_by_the_slow_version(seed, vocab, sharpness, rows, decimals):
    rng = np.random.default_rng(seed)
    # Rounded logits make ties, which the filters must break by id.
    logits = np.round(rng.standard_normal((len(rows), vocab)) * sharpness, decimals)
    logits[rng.random(logits.shape) < 0.2] = -np.inf  # masked
    logits[:, rng.integers(vocab)] = 1.0
    probs = softmax(logits)
    u = rng.random(len(rows))
    top_k, top_p, min_p = (np.array(column) for column in zip(*rows, strict=True))
    tokens = draw(probs, top_k, top_p, min_p, u)
    for i, row in enumerate(rows):
        kept = kept_slowly(probs[i], *row)
        assert tokens[i] in kept
        assert probs[i, tokens[i]] > 0
        expected = drawn_slowly(probs[i], *row, u[i])
        if tokens[i] != expected:  # sums in another order may differ in the last bit, at the very edge between two
            weights = np.where(np.isin(np.arange(vocab), kept), probs[i].astype(float), 0.0)
            edges = np.cumsum(weights) / weights.sum()
            assert np.abs(edges - u[i]).min() < 1e-6


def test_the_ends_of_the_unit_interval_hit_tokens_that_are_possible():
    probs = softmax(np.array([[-np.inf, 0.0, 1.0, -np.inf, 2.0, -np.inf]] * 3))
    off = (np.zeros(3, dtype=np.int64), np.ones(3), np.zeros(3))
    assert draw(probs, *off, np.array([0.0, 1 - 2**-53, 0.5])).tolist() == [1, 4, 4]
    some = (np.array([2, 5, 0]), np.array([1.0, 0.9, 1.0]), np.array([0.0, 0.0, 0.2]))
    assert draw(probs, *some, np.array([0.0, 1 - 2**-53, 0.0])).tolist() == [2, 4, 2]


def test_a_number_on_the_border_of_two_tokens_is_the_second_ones():
    probs = np.full((2, 4), 0.25, dtype=np.float32)
    assert draw(probs, np.array([0, 4]), np.ones(2), np.zeros(2), np.array([0.5, 0.5])).tolist() == [2, 2]


def test_filters_that_reach_into_a_long_flat_tail():
    logits = np.full(20_000, -9.0)
    logits[[5, 500, 5000]] = 0.0
    probs = np.repeat(softmax(logits)[None], 4, axis=0)
    assert 3 * probs[0, 5] < 0.6
    u = np.array([0.999, 0.999, 0.05, 0.999])
    tokens = draw(probs, np.array([0, 0, 0, 18_000]), np.array([0.99, 1.0, 0.99, 1.0]), np.array([0, 1e-5, 0, 0]), u)
    filters = zip([0, 0, 0, 18_000], [0.99, 1.0, 0.99, 1.0], [0, 1e-5, 0, 0], u, strict=True)
    assert tokens.tolist() == [drawn_slowly(probs[0], *row) for row in filters]
    assert min(tokens[[0, 1, 3]]) > 5000 and tokens[2] < 5000


@pytest.mark.slow
def test_frequencies_are_the_probabilities():
    vocab, n = 12, 10_000
    logits = np.random.default_rng(0).standard_normal(vocab) * 1.5
    probs = np.repeat(softmax(logits)[None], n, axis=0)
    u = uniform(np.full(n, 42, dtype=np.uint64), np.arange(n, dtype=np.uint64))
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (8, 0.9, 0.05)]:
        kept = kept_slowly(probs[0], top_k, top_p, min_p)
        expected = np.zeros(vocab)
        expected[kept] = probs[0, kept] / probs[0, kept].sum()
        tokens = draw(probs, np.full(n, top_k), np.full(n, top_p), np.full(n, min_p), u)
        counts = np.bincount(tokens, minlength=vocab)
        assert counts[expected == 0].sum() == 0
        chi_square = ((counts - n * expected)[kept] ** 2 / (n * expected[kept])).sum()
        # The 99.99th percentile for up to 11 degrees of freedom; the numbers are the same on every run.
        assert chi_square < 37.4


def test_uniforms_are_uniform_and_differ_by_seed_and_position():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    u = uniform(seeds.ravel(), positions.ravel())
    assert len(set(u.tolist())) == u.size
    assert u.min() >= 0 and u.max() < 1
    counts, _ = np.histogram(u, bins=100, range=(0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 160  # 99 degrees of freedom, 99.99th percentile
    by_position = u.reshape(200, 200)  # neighbours are not alike, in either direction
    for grid in (by_position, by_position.T):
        correlation = np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]
        assert abs(correlation) < 0.02


def test_uniforms_never_change():
    """A stream that another version of Shoal began goes on as it would have."""
    seeds = np.array([0, 1, 2**64 - 1, 42], dtype=np.uint64)
    expected = [0.6524484863740322, 0.9435642308648544, 0.510562089893682, 0.6952598398323256]
    got = uniform(seeds, np.array([0, 1, 2, 1000], dtype=np.uint64)).tolist()
    assert got == pytest.approx(expected, abs=1e-15)
