"""What a micro-batch costs a stage, in seconds: predicted from its chunks, learned from measured steps.

The time of a step is linear in a few sums over its chunks (`shape.py`), with coefficients that cannot be negative:

    constant                    weights are read and kernels launched, whatever the batch holds
    several                     once, if there is more than one token: one alone has kernels of its own
    mixed                       once, if there is a chunk of more than one token: kernels outside the graph
    rows, piecewise             matrix products: bound by memory at first, by arithmetic later, so the slope only grows;
                                as many as tokens, or as the graph has that the step is padded to (`rows.py`)
    unused rows                 matrix products compute whole tiles of rows
    decodes, their context      rows of the head and of the sampler; KV read once for a token
    chunks, their prefixes      KV read at least once for a chunk
    prefix x chunk, chunk^2     attention of a chunk to what was there before it, and to itself

Because no slope falls, the predicted time is convex in the length of a chunk, and `chunk.py` can invert it. One model
belongs to one stage on one device.
"""

import json
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.regression import robust_fit
from pipeline.rows import UNPADDED, Rows
from pipeline.shape import FEATURES, KNOTS, TILE, TILED_FROM, BatchShape, features, typical_shapes, unused_rows

VERSION = 3
_FIRST_KNOT = FEATURES.index("rows_above_0")
_UNUSED_ROWS = FEATURES.index("unused_rows")
_CHUNKS = FEATURES.index("chunks")
_DECODE_CONTEXT = FEATURES.index("decode_context")
_PREFIX_PRODUCTS = FEATURES.index("prefix_products")
# What is bound by arithmetic, and so by the clock of a device.
_ARITHMETIC = [
    FEATURES.index(name)
    for name in (*(f"rows_above_{knot}" for knot in KNOTS if knot >= TILE), "unused_rows", "prefix_products", "squares")
]


class Coefficients:
    """Seconds for each unit of each feature, none negative, laid out so that predicting is quick."""

    def __init__(self, values: Iterable[float], rows: Rows = UNPADDED) -> None:
        self.values, self.rows = [float(value) for value in values], rows
        if len(self.values) != len(FEATURES) or min(self.values) < 0:
            raise ValueError("there is one coefficient for each feature, and none is negative")
        self.constant, self.several, self.mixed = self.values[:_FIRST_KNOT]
        (
            unused_row,
            self.decode,
            self.decode_context,
            self.chunk,
            self.prefix,
            self.prefix_product,
            self.square,
        ) = self.values[_UNUSED_ROWS:]
        # The cost of n rows in whole tiles is slopes[i] * n + offsets[i], where KNOTS[i] is the last knot below n.
        self.slopes = np.cumsum(self.values[_FIRST_KNOT:_UNUSED_ROWS]).tolist()
        self.offsets = np.cumsum(
            [-c * k for c, k in zip(self.values[_FIRST_KNOT:_UNUSED_ROWS], KNOTS, strict=True)]
        ).tolist()
        # No more than a token, or one token more would make a batch cheaper.
        self.unused_row = min(unused_row, self.slopes[KNOTS.index(TILED_FROM)])

    def of_rows(self, n: int) -> float:
        """The part that depends on nothing but the number of rows."""
        if n < 1:
            return 0.0
        i = bisect_left(KNOTS, n) - 1
        seconds = self.slopes[i] * n + self.offsets[i]
        return seconds + self.unused_row * unused_rows(n) if n > TILED_FROM else seconds

    def predict(self, shape: BatchShape) -> float:
        """Seconds."""
        return self.of_rows(self.rows.of(shape)) + self.besides_rows(shape)

    def besides_rows(self, shape: BatchShape) -> float:
        """The part that does not depend on the number of rows."""
        seconds = self.constant + self.decode * shape.decodes + self.decode_context * shape.decode_context
        if shape.tokens > 1:
            seconds += self.several
        if shape.chunks:
            seconds += self.mixed + self.chunk * shape.chunks + self.prefix * shape.prefixes
            seconds += self.prefix_product * shape.prefix_products + self.square * shape.squares
        return seconds

    def at_clock(self, slower: float) -> "Coefficients":
        """Where arithmetic takes so many times as long."""
        values = list(self.values)
        for feature in _ARITHMETIC:
            values[feature] *= slower
        return Coefficients(values, self.rows)

    def scaled(self, factor: float) -> "Coefficients":
        return Coefficients((value * factor for value in self.values), self.rows)


def slowest_s(models: Iterable["CostModel"], shape: BatchShape) -> float:
    """Seconds of the stage that takes the longest."""
    return max(model.predict(shape) for model in models)


class Window:
    """The newest observations of every kind of batch, so that what is common does not crowd out what is rare."""

    PER_STRATUM = 24

    def __init__(self) -> None:
        self._strata: dict[tuple[int, int, int], deque[tuple[int, float, list[float]]]] = {}
        self.most_rows = 0  # of all observations, those that have gone too

    def add(self, number: int, seconds: float, row: list[float]) -> None:
        """`number` counts observations: it says how old each is. `row`: the features."""
        rows, chunks = int(row[_FIRST_KNOT]), int(row[_CHUNKS])
        self.most_rows = max(self.most_rows, rows)
        attention = int(row[_DECODE_CONTEXT] + row[_PREFIX_PRODUCTS] / 64)
        stratum = (rows.bit_length(), min(chunks, 2), attention.bit_length() // 2)
        self._strata.setdefault(stratum, deque(maxlen=self.PER_STRATUM)).append((number, seconds, row))

    def rows(self) -> list[tuple[int, float, list[float]]]:
        """Number, seconds and features of each, oldest first."""
        return sorted(row for kept in self._strata.values() for row in kept)


class CostModel:
    """Predicts the time of a batch on one stage, and learns from each measured one.

    Until there are measurements it predicts what `prior` says (a roofline: see `roofline.py`); later the prior, scaled
    to what was measured, stands for kinds of batches that never came, and takes over again whenever the fit has been
    worse than it lately.

    Between two fits it follows the clock of the device, which follows its heat: measured on an H200, the same prompts
    took 13% longer than minutes before. What the newest steps took beyond what is predicted is put down to what is
    bound by arithmetic, in steps that mostly are. Where it is far off otherwise, it does not wait for the next fit: a
    kind of step has come that it had not seen.
    """

    HALF_LIFE = 1024  # observations after which one counts half
    PRIOR_WEIGHT = 0.02  # of a typical shape, beside an observation's 1
    REFIT_EVERY = 128
    FIRST_FITS = (8, 16, 32, 64)
    FAR_OFF, FAR_OFF_STEPS = 0.05, 16  # the median error of so many newest steps, twice what it was before
    RECENT = 256
    CLOCK_STEPS = 4, 16  # the newest steps, whose median counts: so many at least and at most
    CLOCKS, CLOCK_MOVES = (0.5, 2.0), 0.01
    MOSTLY = 0.2  # the part of a step's time

    def __init__(
        self,
        prior: Callable[[BatchShape], float],
        identity: Mapping[str, Any] | None = None,
        turn: int = 0,
        rows: Rows = UNPADDED,
    ) -> None:
        """`identity`: what is measured (model, layers, device, ranks), as JSON holds it. `turn`: models that observe
        the same steps are fitted after different ones, since each fit takes milliseconds. `rows`: those that the stage
        computes of a step."""
        self._turn = 37 * turn
        self.rows = rows
        self.identity = dict(identity or {})
        self._grid = np.array([features(shape, rows.of(shape)) for shape in typical_shapes()])
        self._grid_s = np.array([prior(shape) for shape in typical_shapes()])
        self._prior = Coefficients(robust_fit(self._grid, self._grid_s, np.ones(len(self._grid))), rows)
        self._prior_scale = 1.0
        self._fitted: Coefficients | None = None
        self._window = Window()
        self.num_observed = 0
        self._fitted_at = 0
        # Of the newest observations, before each was learned from: how far off the scaled prior and the fit were, and
        # what was predicted by the two together; the ratio of measured to prior.
        self._prior_errors: deque[float] = deque(maxlen=self.RECENT)
        self._fit_errors: deque[float] = deque(maxlen=self.RECENT)
        self._errors: deque[float] = deque(maxlen=self.RECENT)
        self._ratios: deque[float] = deque(maxlen=self.RECENT)
        self._slower: deque[float] = deque(maxlen=self.CLOCK_STEPS[1])
        self._clock = 1.0  # in the coefficients
        self._learned = self.coefficients = self._prior

    @property
    def most_rows(self) -> int:
        """The rows of the largest batch that was observed."""
        return self._window.most_rows

    def predict(self, shape: BatchShape) -> float:
        """Seconds that the stage takes for such a batch."""
        return self.coefficients.predict(shape)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """A batch took the stage so long. `shape` is not kept."""
        if not seconds > 0.0 or not shape.tokens:
            return
        prior = self._prior.predict(shape)
        self._errors.append(abs(self.predict(shape) / seconds - 1.0))
        self._prior_errors.append(abs(prior * self._prior_scale / seconds - 1.0))
        if self._fitted is not None:
            self._fit_errors.append(abs(self._fitted.predict(shape) / seconds - 1.0))
        self._ratios.append(seconds / prior)
        self.num_observed += 1
        row = features(shape, self.rows.of(shape))
        self._window.add(self.num_observed, seconds, row)
        self._follow_clock(seconds, row)
        due = self.num_observed in self.FIRST_FITS or (self.num_observed + self._turn) % self.REFIT_EVERY == 0
        if due or self._is_far_off():
            self._refit()

    def error(self) -> float:
        """The median relative error of the newest predictions, made before their batch was measured. NaN before the
        first."""
        return float(np.median(self._errors)) if self._errors else float("nan")

    def _is_far_off(self) -> bool:
        steps = self.FAR_OFF_STEPS
        if self.num_observed < self._fitted_at + 2 * steps:  # fits take time, too
            return False
        newest = statistics.median(islice(reversed(self._errors), steps))
        return newest > self.FAR_OFF and newest > 2 * self.error()

    def _follow_clock(self, seconds: float, row: list[float]) -> None:
        terms = [value * times for value, times in zip(self._learned.values, row, strict=True)]
        predicted, arithmetic = sum(terms), sum(terms[feature] for feature in _ARITHMETIC)
        if arithmetic <= 0.0 or arithmetic < self.MOSTLY * predicted:  # a fit of noise may give a kind of step no time
            return
        self._slower.append((seconds - predicted + arithmetic) / arithmetic)
        if len(self._slower) < self.CLOCK_STEPS[0]:
            return
        least, most = self.CLOCKS
        clock = min(most, max(least, statistics.median(self._slower)))
        if abs(clock / self._clock - 1.0) > self.CLOCK_MOVES:
            self._clock, self.coefficients = clock, self._learned.at_clock(clock)

    def _refit(self) -> None:
        rows = self._window.rows()
        numbers = np.array([number for number, _, _ in rows])
        seconds = np.array([measured for _, measured, _ in rows])
        observed = np.array([row for _, _, row in rows])
        self._prior_scale = float(np.median(self._ratios))
        weights = 0.5 ** ((self.num_observed - numbers) / self.HALF_LIFE)
        self._fitted = Coefficients(
            robust_fit(
                np.concatenate([observed, self._grid]),
                np.concatenate([seconds, self._grid_s * self._prior_scale]),
                np.concatenate([weights, np.full(len(self._grid), self.PRIOR_WEIGHT)]),
            ),
            self.rows,
        )
        recent = min(len(self._fit_errors), self.REFIT_EVERY)
        fit = np.median(list(self._fit_errors)[-recent:]) if recent else 0.0
        prior = np.median(list(self._prior_errors)[-recent:]) if recent else 1.0
        self._learned = self._fitted if fit <= prior else self._prior.scaled(self._prior_scale)
        self.coefficients = self._learned
        self._slower.clear()
        self._clock = 1.0
        self._fitted_at = self.num_observed

    # ------------------------------------------------------------ on disk

    def save(self, path: Path) -> None:
        """Writes what was learned, as JSON."""
        saved = {
            "version": VERSION,
            "features": FEATURES,
            "identity": self.identity,
            "num_observed": self.num_observed,
            "error": self.error() if self._errors else None,
            "coefficients": self._learned.values,
            "window": self._window.rows(),
        }
        path.write_text(json.dumps(saved))

    def load(self, path: Path) -> None:
        """Goes on from what `save` wrote. Raises ValueError when that is of another version, of something else than
        this model's `identity` or no such thing, and OSError when it cannot be read; the model is then as it was."""
        try:
            saved = json.loads(path.read_text())
            if saved["version"] != VERSION or tuple(saved["features"]) != FEATURES:
                raise ValueError("it was written by another version")
            if saved["identity"] != self.identity:
                raise ValueError(f"it was measured on {saved['identity']}, this is {self.identity}")
            prior = np.array(self._prior.values)
            rows = [(int(number), float(seconds), [float(x) for x in row]) for number, seconds, row in saved["window"]]
            ratios = [seconds / float(prior @ row) for _, seconds, row in rows]
            learned, num_observed = [float(x) for x in saved["coefficients"]], int(saved["num_observed"])
            if not np.isfinite([*learned, *ratios, *(x for _, _, row in rows for x in row)]).all() or num_observed < 1:
                raise ValueError("it has numbers in it that are none")
            if min(ratios, default=1.0) <= 0.0:
                raise ValueError("it has steps in it that took no time")
            coefficients = Coefficients(learned, self.rows)
        except (KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"it is no saved cost model ({type(error).__name__}: {error})") from error
        for row in rows:
            self._window.add(*row)
        self._ratios.extend(ratios)
        self.num_observed = num_observed
        if ratios:
            self._refit()
            self._learned = self.coefficients = coefficients
