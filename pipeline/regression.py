"""Least squares with nonnegative coefficients, robust against outliers."""

import numpy as np

HUBER_DEVIATIONS = 1.345  # standard deviations beyond which residuals count linearly (95% efficient for normal noise)
NUM_ROUNDS = 4


def robust_fit(rows: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Coefficients c >= 0 that minimise the relative error of `rows @ c` to `seconds`.

    | argument | shape | range |
    | --- | --- | --- |
    | `rows` | [n, features] | >= 0 |
    | `seconds` | [n] | > 0 |
    | `weights` | [n] | >= 0 |

    Huber's weights by iterated reweighting (P. J. Huber, Robust Statistics, 1981); the scale is the median absolute
    residual. Errors are relative to the measured time, so a measurement that took ten times too long is off by at most
    1.
    """
    relative = rows / seconds[:, None]
    unit = np.maximum(relative.max(axis=0), 1e-30)
    relative = relative / unit
    trust = np.ones(len(rows))
    coefficients = np.zeros(rows.shape[1])
    for _ in range(NUM_ROUNDS):
        weighted = relative * (weights * trust)[:, None]
        coefficients = nonnegative(relative.T @ weighted, weighted.sum(axis=0), coefficients > 0)
        residuals = np.abs(relative @ coefficients - 1.0)
        scale = 1.4826 * _weighted_median(residuals, weights) + 1e-4
        trust = np.minimum(1.0, HUBER_DEVIATIONS * scale / np.maximum(residuals, 1e-12))
    return coefficients / unit


def nonnegative(gram: np.ndarray, moment: np.ndarray, guess: np.ndarray) -> np.ndarray:
    """Minimises x' gram x - 2 moment' x over x >= 0, by the active set method of Lawson and Hanson (Solving Least
    Squares Problems, 1974, chapter 23).

    `gram` [n, n]: positive semidefinite. `moment` [n]. `guess` [n], bool: elements of x that are likely positive.
    """
    n = len(moment)
    gram = gram + np.eye(n) * (1e-10 * max(np.trace(gram), 1e-30))
    x = np.zeros(n)
    free = np.zeros(n, dtype=bool)  # the others are held at zero
    if guess.any():
        solution = np.linalg.solve(gram[np.ix_(guess, guess)], moment[guess])
        if (solution > 0).all():
            x[guess] = solution
            free = guess.copy()
    tolerance = 1e-10 * float(np.abs(moment).max(initial=1e-30))
    for _ in range(4 * n):
        gradient = np.where(free, -np.inf, moment - gram @ x)
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while free.any():
            chosen = np.flatnonzero(free)
            solution = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
            falling = solution <= 0
            if not falling.any():
                x[:] = 0
                x[chosen] = solution
                break
            # Go as far as the first element that would become negative, and hold that element at zero.
            steps = x[chosen[falling]] / (x[chosen[falling]] - solution[falling] + 1e-300)
            step = float(steps.min())
            x[chosen] += step * (solution - x[chosen])
            free[chosen[falling][steps <= step]] = False
            x[~free] = 0
    return x


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, sums[-1] / 2)])
