"""The fit: never negative, and not bent by outliers."""

import itertools

import numpy as np

from pipeline.regression import nonnegative, robust_fit


def test_nonnegative_least_squares_finds_the_best_of_all_supports():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows, target = rng.normal(size=(12, 5)), rng.normal(size=12)
        gram, moment = rows.T @ rows, rows.T @ target
        x = nonnegative(gram, moment, rng.random(5) < 0.5)
        assert (x >= 0).all()

        def loss(y, gram=gram, moment=moment):
            return y @ gram @ y - 2 * moment @ y

        best = 0.0
        for size in range(1, 6):
            for support in itertools.combinations(range(5), size):
                y = np.zeros(5)
                y[list(support)] = np.linalg.solve(gram[np.ix_(support, support)], moment[list(support)])
                if (y >= 0).all():
                    best = min(best, loss(y))
        assert loss(x) <= best + 1e-6


def test_measurements_ten_times_too_long_do_not_bend_the_fit():
    rng = np.random.default_rng(1)
    rows = np.column_stack([np.ones(300), rng.uniform(1, 2000, 300), rng.uniform(0, 1e6, 300)])
    true = np.array([5e-3, 4e-5, 2e-8])
    seconds = rows @ true * rng.lognormal(0, 0.01, 300)
    seconds[rng.random(300) < 0.1] *= 10
    fitted = robust_fit(rows, seconds, np.ones(300))
    assert np.abs(rows @ fitted / (rows @ true) - 1).max() < 0.02


def test_a_row_without_weight_does_not_count():
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0], [1.0, 9.0]])
    seconds = np.array([3.0, 5.0, 7.0, 1.0])
    fitted = robust_fit(rows, seconds, np.array([1.0, 1.0, 1.0, 0.0]))
    np.testing.assert_allclose(fitted, [1.0, 2.0], rtol=1e-4)
