"""Prediction of output lengths by a linear model that learns from every request that ends."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from worker.lengths.bounds import NO_LIMIT, longest_output
from worker.lengths.features import NUM_FEATURES, arrival_features
from worker.messages import Generate, LengthSample

MIN_LEARNED_REQUESTS = 64  # requests that must have ended before anything is predicted
# AdaGrad's, in units of the natural logarithm of a length. Tuned on 1,152 outputs of SmolLM2, with
# `bench.lengths.accuracy`: 0.1 to 0.5 differ by 0.04 in tau.
LEARNING_RATE = 0.2
ERROR_WEIGHT = 1 / 64  # weight of the newest error in the spread
WINDOW_OUTPUTS = 256  # newest outputs whose predictions are compared with them
ACCURACY_EVERY_OUTPUTS = 32


class LengthEstimate(NamedTuple):
    """The expected length of an output, log-normal.

    | field | meaning |
    | --- | --- |
    | `log_mean` | mean of the natural logarithm of the length in tokens |
    | `log_spread` | standard deviation of that logarithm |
    """

    log_mean: float
    log_spread: float

    def to_come(self, produced: int, allowed: int) -> float:
        """Expected further tokens of an output that has `produced` tokens and ends at `allowed` at the latest.

        With X log-normal, t = `produced` and c = `allowed` it is E[min(X, c) - t | X > t]
        = (M(t) - M(c)) / S(t) + c S(c) / S(t) - t, where S(x) = P(X > x), and
        M(x) = E[X; X > x] = exp(m + s^2 / 2) Phi((m + s^2 - ln x) / s).
        """
        if produced >= allowed:
            return 0.0
        survive = self._survive(produced)
        if survive < 1e-9:  # far beyond what was expected: the formula would divide by nothing
            return float(allowed - produced)
        whole = self._mean_above(produced) - self._mean_above(allowed) + allowed * self._survive(allowed)
        return min(float(allowed - produced), max(1.0, whole / survive - produced))

    def _survive(self, length: int) -> float:
        return 1.0 if length <= 0 else _phi((self.log_mean - math.log(length)) / self.log_spread)

    def _mean_above(self, length: int) -> float:
        mean, variance = self.log_mean, self.log_spread**2
        whole = math.exp(mean + variance / 2)
        return whole if length <= 0 else whole * _phi((mean + variance - math.log(length)) / self.log_spread)


class PredictedLength(NamedTuple):
    """The length of an output as it is known at the request's arrival.

    | field | meaning |
    | --- | --- |
    | `features` | the request's, uint16 [n] |
    | `estimate` | None if too little had been learned |
    | `longest` | the longest output that its grammar allows, in tokens |
    """

    features: np.ndarray
    estimate: LengthEstimate | None
    longest: int = NO_LIMIT


def _phi(z: float) -> float:
    """The normal distribution function."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


class OutputLengthPredictor:
    """Learns output lengths on line: a regression of the logarithm on sparse features.

    - Steps are AdaGrad's (Duchi et al., JMLR 12, 2011): a feature that is rare moves as fast as one that is frequent.
    - An output that its limit has cut was at least that long. It teaches nothing if the prediction was longer.
    - The spread is the root mean square of the newest errors.
    - Nothing depends on time or chance, so the same traffic gives the same predictions.
    """

    def __init__(self) -> None:
        self._weights = np.zeros(NUM_FEATURES, dtype=np.float32)
        self._squares = np.zeros(NUM_FEATURES, dtype=np.float32)  # sums of the squared gradients
        self._mean = 0.0  # of the logarithms
        self._variance = 1.0
        self.num_learned = 0
        self._newest: deque[tuple[LengthEstimate, int]] = deque(maxlen=WINDOW_OUTPUTS)  # and the real length
        self._accuracy: tuple[float | None, float | None] = None, None
        self._accuracy_due = MIN_LEARNED_REQUESTS
        self._sample: LengthSample | None = None  # of the newest output, until it is taken

    def arrived(self, request: Generate) -> PredictedLength:
        """Predicts the length of a request's output."""
        features = arrival_features(request.prompt_ids, request.sampling)
        return PredictedLength(features, self._estimate(features), longest_output(request.sampling.grammar))

    def again(self, length: PredictedLength) -> PredictedLength:
        """Predicts that length by what has been learned since."""
        return length._replace(estimate=self._estimate(length.features))

    def ended(self, length: PredictedLength, produced: int, was_cut: bool) -> None:
        """Learns that the output of that request has ended after `produced` tokens. `was_cut`: by its limit."""
        features, estimate, _ = length
        if estimate is not None:
            self._newest.append((estimate, max(1, produced)))
        self._sample = LengthSample(features.astype("<u2").tobytes(), produced, was_cut)
        self._learn(features, produced, was_cut)

    def take_sample(self) -> LengthSample | None:
        """The newest output that has ended since the last call."""
        sample, self._sample = self._sample, None
        return sample

    def begin_with(self, samples: Iterable[LengthSample]) -> None:
        """Learns from outputs of other replicas, if too little has been learned here to predict any. Passes over what
        is no sample."""
        if self.num_learned >= MIN_LEARNED_REQUESTS:
            return
        for sample in samples:
            if sample.features and len(sample.features) % 2 == 0 and sample.tokens >= 0:
                self._learn(np.frombuffer(sample.features, dtype="<u2"), sample.tokens, sample.was_cut)

    def _learn(self, features: np.ndarray, produced: int, was_cut: bool) -> None:
        predicted, log_length = self._log_mean(features), math.log(max(1, produced))
        self.num_learned += 1
        if was_cut and predicted > log_length:
            return
        error = log_length - predicted
        self._mean += (log_length - self._mean) / min(self.num_learned, 1 / ERROR_WEIGHT)
        self._variance += (min(error * error, 9.0) - self._variance) * max(ERROR_WEIGHT, 1 / self.num_learned)
        self._variance = max(self._variance, 1e-4)
        gradient = error / math.sqrt(len(features))
        self._squares[features] += gradient * gradient
        self._weights[features] += LEARNING_RATE * gradient / np.sqrt(self._squares[features] + 1e-6)

    def learned(self) -> dict[str, np.ndarray]:
        """All that was learned, as arrays by name, for `restore`."""
        known = np.array([self._mean, self._variance, self.num_learned], dtype=np.float64)
        return {"known": known, "weights": self._weights, "squares": self._squares}

    def restore(self, learned: Mapping[str, np.ndarray]) -> None:
        """Goes on from what `learned` gave. Raises KeyError and ValueError, with nothing changed, for anything else."""
        known, weights, squares = (learned[name] for name in ("known", "weights", "squares"))
        if known.shape != (3,) or not weights.shape == squares.shape == (NUM_FEATURES,):
            raise ValueError("arrays of other shapes")
        if not all(np.isfinite(each).all() for each in (known, weights, squares)) or (squares < 0).any():
            raise ValueError("values that no learning gives")
        self._mean, self._variance, self.num_learned = float(known[0]), max(float(known[1]), 1e-4), int(known[2])
        self._weights, self._squares = weights.astype(np.float32), squares.astype(np.float32)
        self._accuracy_due = max(MIN_LEARNED_REQUESTS, self.num_learned + ACCURACY_EVERY_OUTPUTS)

    def accuracy(self) -> tuple[float | None, float | None]:
        """Kendall's tau between the predicted and the real lengths of the newest outputs, and their real tokens over
        the predicted ones. Updated every `ACCURACY_EVERY_OUTPUTS` outputs. None while there are none."""
        if self.num_learned >= self._accuracy_due:
            self._accuracy_due = self.num_learned + ACCURACY_EVERY_OUTPUTS
            if self._newest:
                predicted = np.array([estimate.log_mean for estimate, _ in self._newest])
                real = np.array([produced for _, produced in self._newest])
                expected = sum(estimate.to_come(0, NO_LIMIT) for estimate, _ in self._newest)
                tau = kendall_tau(predicted, real)
                self._accuracy = None if math.isnan(tau) else tau, float(real.sum()) / expected
        return self._accuracy

    def _estimate(self, features: np.ndarray) -> LengthEstimate | None:
        if self.num_learned < MIN_LEARNED_REQUESTS:
            return None
        return LengthEstimate(self._log_mean(features), math.sqrt(self._variance))

    def _log_mean(self, features: np.ndarray) -> float:
        return self._mean + float(self._weights[features].sum()) / math.sqrt(len(features))


def kendall_tau(first: np.ndarray, second: np.ndarray) -> float:
    """Kendall's tau-b of two rankings of the same n things, by comparing all pairs. Both [n]. NaN if either has no two
    different values."""
    a, b = (np.sign(values[:, None] - values[None, :]) for values in (first, second))
    scale = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / scale if scale else math.nan
