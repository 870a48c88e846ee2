"""Cost models: the time of a micro-batch on a stage, in seconds, predicted from its chunks and learned from measured
steps.

The predicted time is linear in a few sums over the chunks (`shape.py`). No coefficient is negative.

| feature | cost |
| --- | --- |
| `constant` | reading the weights and launching kernels, whatever the batch holds |
| `several` | once if there is more than one token; a single token has kernels of its own |
| `mixed` | once if there is a chunk of more than one token: kernels outside the CUDA graph |
| `rows_above_*` | matrix products, piecewise linear in the rows |
| `unused_rows` | matrix products compute whole tiles of rows |
| `decodes`, `decode_context` | rows of the head and of the sampler; KV read once for each decode |
| `chunks`, `prefixes` | KV read at least once for each chunk |
| `prefix_products`, `squares` | attention of a chunk to the tokens before it (prefix x chunk) and to itself (chunk^2) |

Rows are the tokens, or the size of the CUDA graph that the step is padded to (`padding.py`). Matrix products are bound
by memory first and by arithmetic later, so the slope over rows only grows.

As no slope falls, the predicted time is convex in the length of a chunk, and `chunk.py` can invert it. Each model
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

from pipeline.padding import UNPADDED, PaddedSizes
from pipeline.regression import robust_fit
from pipeline.shape import FEATURES, KNOTS, TILED_FROM, BatchShape, features, typical_shapes, unused_rows

VERSION = 3
_FIRST_KNOT = FEATURES.index("rows_above_0")
_UNUSED_ROWS = FEATURES.index("unused_rows")
_CHUNKS = FEATURES.index("chunks")
_DECODE_CONTEXT = FEATURES.index("decode_context")
_PREFIX_PRODUCTS = FEATURES.index("prefix_products")


class Coefficients:
    """Seconds per unit of each feature, none negative, laid out for fast prediction."""

    def __init__(self, values: Iterable[float], rows: PaddedSizes = UNPADDED) -> None:
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
        # At most the cost of a token, or one token more could make a batch cheaper.
        self.unused_row = min(unused_row, self.slopes[KNOTS.index(TILED_FROM)])

    def of_rows(self, n: int) -> float:
        """Seconds that depend on the number of rows alone."""
        if n < 1:
            return 0.0
        i = bisect_left(KNOTS, n) - 1
        seconds = self.slopes[i] * n + self.offsets[i]
        return seconds + self.unused_row * unused_rows(n) if n > TILED_FROM else seconds

    def predict(self, shape: BatchShape) -> float:
        """Seconds of a batch."""
        return self.of_rows(self.rows.padded(shape)) + self.besides_rows(shape)

    def besides_rows(self, shape: BatchShape) -> float:
        """Seconds that do not depend on the number of rows."""
        seconds = self.constant + self.decode * shape.decodes + self.decode_context * shape.decode_context
        if shape.tokens > 1:
            seconds += self.several
        if shape.chunks:
            seconds += self.mixed + self.chunk * shape.chunks + self.prefix * shape.prefixes
            seconds += self.prefix_product * shape.prefix_products + self.square * shape.squares
        return seconds

    def scaled(self, factor: float) -> "Coefficients":
        return Coefficients((value * factor for value in self.values), self.rows)


def slowest_s(models: Iterable["CostModel"], shape: BatchShape) -> float:
    """Seconds of the slowest stage."""
    return max(model.predict(shape) for model in models)


class Window:
    """The newest observations of every kind of batch, so that frequent kinds do not crowd out rare ones."""

    PER_STRATUM = 24

    def __init__(self) -> None:
        self._strata: dict[tuple[int, int, int], deque[tuple[int, float, list[float]]]] = {}
        self.most_rows = 0  # of all observations, including dropped ones

    def add(self, number: int, seconds: float, row: list[float]) -> None:
        """`number`: running number of the observation, which tells its age. `row`: the features."""
        rows, chunks = int(row[_FIRST_KNOT]), int(row[_CHUNKS])
        self.most_rows = max(self.most_rows, rows)
        attention = int(row[_DECODE_CONTEXT] + row[_PREFIX_PRODUCTS] / 64)
        stratum = (rows.bit_length(), min(chunks, 2), attention.bit_length() // 2)
        self._strata.setdefault(stratum, deque(maxlen=self.PER_STRATUM)).append((number, seconds, row))

    def rows(self) -> list[tuple[int, float, list[float]]]:
        """Number, seconds and features of each observation, oldest first."""
        return sorted(row for kept in self._strata.values() for row in kept)


class CostModel:
    """Predicts the time of a batch on one stage, and learns from each measured one.

    - Before any measurement it predicts what `prior` says (a roofline, `roofline.py`).
    - Later a fit to the measurements predicts. The prior, scaled to the measurements, stands in for kinds of batches
      that never came. It predicts again whenever the fit's recent errors exceed its own.
    - If the newest predictions are far off, the model is refitted at once: a kind of step has come that it had not
      seen.
    - A device's clock depends on its heat: on an H200, the same prompts took 13% longer than minutes before. Such a
      change is learned in some 200 steps, as they replace the older ones of their kind in the window.

    These guard predictions, not the simulated speed of a device that is as predicted. docs/MECHANISMS.md has the errors
    without each.
    """

    HALF_LIFE_STEPS = 1024  # observations after which the weight of an observation has halved
    PRIOR_WEIGHT = 0.02  # of a typical shape; that of a new observation is 1
    REFIT_EVERY_STEPS = 128
    FIRST_FITS = (8, 16, 32, 64)
    FAR_OFF_ERROR, FAR_OFF_STEPS = 0.05, 16  # median error of the newest steps, their number
    RECENT_STEPS = 256

    def __init__(
        self,
        prior: Callable[[BatchShape], float],
        identity: Mapping[str, Any] | None = None,
        turn: int = 0,
        rows: PaddedSizes = UNPADDED,
    ) -> None:
        """Starts from `prior`, the seconds of a batch.

        - `identity`: the measured object (model, layers, device, ranks), as JSON holds it.
        - `turn`: number of this model. A fit takes milliseconds, so models that observe the same steps are fitted after
          different ones.
        - `rows`: number of rows that the stage computes for a step.
        """
        self._turn = 37 * turn
        self.rows = rows
        self.identity = dict(identity or {})
        self._grid = np.array([features(shape, rows.padded(shape)) for shape in typical_shapes()])
        self._grid_s = np.array([prior(shape) for shape in typical_shapes()])
        self._prior = Coefficients(robust_fit(self._grid, self._grid_s, np.ones(len(self._grid))), rows)
        self._prior_scale = 1.0
        self._fitted: Coefficients | None = None
        self._window = Window()
        self.num_observed = 0
        self._fitted_at = 0
        # Of the newest observations, each before it was learned from: relative errors of the scaled prior, of the fit
        # and of the model's prediction; the ratio of the measured time to the prior.
        self._prior_errors: deque[float] = deque(maxlen=self.RECENT_STEPS)
        self._fit_errors: deque[float] = deque(maxlen=self.RECENT_STEPS)
        self._errors: deque[float] = deque(maxlen=self.RECENT_STEPS)
        self._ratios: deque[float] = deque(maxlen=self.RECENT_STEPS)
        self.coefficients = self._prior

    @property
    def most_rows(self) -> int:
        """Rows of the largest observed batch."""
        return self._window.most_rows

    def predict(self, shape: BatchShape) -> float:
        """Seconds that the stage takes for a batch."""
        return self.coefficients.predict(shape)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learns that a batch took the stage `seconds`. `shape` is not kept."""
        if not seconds > 0.0 or not shape.tokens:
            return
        prior = self._prior.predict(shape)
        self._errors.append(abs(self.predict(shape) / seconds - 1.0))
        self._prior_errors.append(abs(prior * self._prior_scale / seconds - 1.0))
        if self._fitted is not None:
            self._fit_errors.append(abs(self._fitted.predict(shape) / seconds - 1.0))
        self._ratios.append(seconds / prior)
        self.num_observed += 1
        row = features(shape, self.rows.padded(shape))
        self._window.add(self.num_observed, seconds, row)
        due = self.num_observed in self.FIRST_FITS or (self.num_observed + self._turn) % self.REFIT_EVERY_STEPS == 0
        if due or self._is_far_off():
            self._refit()

    def error(self) -> float:
        """Median relative error of the newest predictions, each made before its batch was measured. NaN before the
        first."""
        return float(np.median(self._errors)) if self._errors else float("nan")

    def _is_far_off(self) -> bool:
        steps = self.FAR_OFF_STEPS
        if self.num_observed < self._fitted_at + 2 * steps:  # fits take time
            return False
        newest = statistics.median(islice(reversed(self._errors), steps))
        return newest > self.FAR_OFF_ERROR and newest > 2 * self.error()

    def _refit(self) -> None:
        rows = self._window.rows()
        numbers = np.array([number for number, _, _ in rows])
        seconds = np.array([measured for _, measured, _ in rows])
        observed = np.array([row for _, _, row in rows])
        self._prior_scale = float(np.median(self._ratios))
        weights = 0.5 ** ((self.num_observed - numbers) / self.HALF_LIFE_STEPS)
        self._fitted = Coefficients(
            robust_fit(
                np.concatenate([observed, self._grid]),
                np.concatenate([seconds, self._grid_s * self._prior_scale]),
                np.concatenate([weights, np.full(len(self._grid), self.PRIOR_WEIGHT)]),
            ),
            self.rows,
        )
        recent = min(len(self._fit_errors), self.REFIT_EVERY_STEPS)
        fit = np.median(list(self._fit_errors)[-recent:]) if recent else 0.0
        prior = np.median(list(self._prior_errors)[-recent:]) if recent else 1.0
        self.coefficients = self._fitted if fit <= prior else self._prior.scaled(self._prior_scale)
        self._fitted_at = self.num_observed

    # ------------------------------------------------------------ on disk

    def save(self, path: Path) -> None:
        """Writes the learned state as JSON."""
        saved = {
            "version": VERSION,
            "features": FEATURES,
            "identity": self.identity,
            "num_observed": self.num_observed,
            "error": self.error() if self._errors else None,
            "coefficients": self.coefficients.values,
            "window": self._window.rows(),
        }
        path.write_text(json.dumps(saved))

    def load(self, path: Path) -> None:
        """Restores what `save` wrote.

        Raises ValueError if the file is of another version, of another `identity` or malformed, and OSError if it
        cannot be read. After an error the model is unchanged.
        """
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
            raise ValueError(f"it is not a saved cost model ({type(error).__name__}: {error})") from error
        for row in rows:
            self._window.add(*row)
        self._ratios.extend(ratios)
        self.num_observed = num_observed
        if ratios:
            self._refit()
            self.coefficients = coefficients
