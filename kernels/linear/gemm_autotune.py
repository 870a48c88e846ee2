"""Autotuning of matrix products: times cuBLASLt's algorithms at start, and takes the fastest for each weight and size.

PyTorch takes the algorithm that cuBLAS's heuristic names first, untimed. On an H200 the products of a Llama-3.1-8B step
take 4.3% less time with the best algorithms at 64 rows, 5.7% at 192, 3.9% at 256 and 2.9% at 8,192.

A choice holds until the process ends, so that the same rows in a batch of the same size always give the same bits. With
a folder it is kept on disk (`kernels.linear.gemm_cache`), and the next start times only the sizes that are new.
"""

import bisect
import enum
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from kernels.linear.cublaslt import ALIGNMENT_BYTES, Algorithm, CublasLt, GemmProblem, Product
from kernels.linear.gemm_cache import GemmCache, GemmChoice

logger = logging.getLogger(__name__)

Call = Callable[[], object]
Times = Callable[[Sequence[Sequence[Call]], int], list[float]]
"""A clock: (runs, rounds) to the microseconds of each run. A run is a list of calls that are launched one after the
other. The runs take turns for `rounds` rounds, and the median of a run's rounds counts."""

LIMIT_S = 16.0
"""Seconds after which timing stops; products that have not been timed by then stay PyTorch's. An 8B model takes 5 s on
a machine that has just started and reads its libraries from disk, a stage of 20 layers of a 70B model with the head and
1,024 slots 9 s."""

LEAST_GAIN = 0.015
"""Part of its time that another algorithm must save to replace PyTorch's own."""

# Steps with prefill chunks have any number of rows. These sizes are timed, up to a step's largest. They are so close to
# each other that the same tiles suit the sizes between.
_LARGE_SIZES = (512, 1024, 2048, 4096, 6144, 8192)
# Most rows for which the head's product, which gives the logits, is timed. Its matrix is the largest: more rows would
# take seconds. At this size PyTorch's own product takes up to a tenth longer than the fastest (70B, 8B, Qwen3-0.6B;
# H200), but it is only one product of a step.
_MOST_LOGITS = 256
# An algorithm that was chosen for n rows is also used for fewer rows, down to this part of n.
_REACH = 0.75

_RUN_BYTES = 400 << 20  # bytes of weights that a run reads, which takes about 0.1 ms
_MOST_CALLS = 16  # calls of a run
_LONG_ROWS = 1024  # rows beyond which a run is one call
_FINALISTS = 3  # algorithms that are timed a second time, for more rounds
_TOLERANCE = 0.01  # largest relative error of a result that is believed


class Epilogue(enum.Enum):
    """How a product is stored: `PLAIN` in the dtype of its factors; `ADDED` to a matrix of that dtype; `FLOAT32` as it
    was summed up, without rounding."""

    PLAIN = "plain"
    ADDED = "added"
    FLOAT32 = "float32"


class GemmLibrary(Protocol):
    """The parts of `kernels.linear.cublaslt.CublasLt` that are used here. Its docstrings hold."""

    identity: str

    def candidates(self, problem: GemmProblem) -> list[Algorithm]: ...

    def product(self, problem: GemmProblem, algorithm: Algorithm) -> Product | None: ...


class TunedGemm:
    """The algorithms chosen for all weights of one shape and one use, by the number of rows."""

    def __init__(self, library: GemmLibrary, use: Epilogue, weight: torch.Tensor) -> None:
        self.use = use
        self._library, self._shape, self._dtype = library, weight.shape, weight.dtype
        self._sizes: list[int] = []
        self._algorithms: dict[int, Algorithm | None] = {}
        self._products: dict[tuple[int, Epilogue], Product | None] = {}

    def problem(self, rows: int, use: Epilogue | None = None) -> GemmProblem:
        """The product that is timed for `rows` rows, or that of another use."""
        use = use or self.use
        out_dtype = torch.float32 if use is Epilogue.FLOAT32 else self._dtype
        out_size, in_size = self._shape
        return GemmProblem(rows, out_size, in_size, self._dtype, out_dtype, use is Epilogue.ADDED)

    def choose(self, rows: int, algorithm: Algorithm | None) -> None:
        """Sets the algorithm for `rows` rows; None is PyTorch's own. To be called before the first `find`."""
        bisect.insort(self._sizes, rows)
        self._algorithms[rows] = algorithm

    def find(self, rows: int, use: Epilogue) -> Product | None:
        """The product for `rows` rows; None if PyTorch's own should be used. An algorithm that was chosen for `PLAIN`
        serves `ADDED` too: it differs in a factor alone. No other use is served but the one that was timed."""
        try:
            return self._products[rows, use]
        except KeyError:
            found = self._products[rows, use] = self._found(rows, use)
            return found

    def _found(self, rows: int, use: Epilogue) -> Product | None:
        if use is not self.use and (self.use, use) != (Epilogue.PLAIN, Epilogue.ADDED):
            return None
        index = bisect.bisect_left(self._sizes, rows)
        if index == len(self._sizes) or rows < _REACH * self._sizes[index]:
            return None
        algorithm = self._algorithms[self._sizes[index]]
        return None if algorithm is None else self._library.product(self.problem(rows, use), algorithm)


class TunableLinear(Protocol):
    """The part of `kernels.linear.linear.Linear` that is tuned. Its docstrings hold."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    tuned: TunedGemm | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None: ...

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


_Group = tuple[Epilogue, torch.Size]
"""The use and the weight's shape that linear layers of one group have in common."""


class TuneResult(NamedTuple):
    """Microseconds that all products of a step of `rows` rows take together: with PyTorch's own algorithms, and with
    the chosen ones."""

    rows: int
    own_us: float
    chosen_us: float


def autotune(
    uses: Iterable[tuple[TunableLinear, Epilogue]],
    step_sizes: Sequence[int],
    most_rows: int,
    open_library: Callable[[], GemmLibrary] = CublasLt,
    times: Times | None = None,
    clock: Callable[[], float] = time.monotonic,
    folder: Path | None = None,
) -> list[TuneResult]:
    """Times the products of a model's linear layers, and sets the fastest algorithms in their `tuned`.

    uses: each layer with the use of its product. step_sizes: the most frequent numbers of rows. most_rows: rows of the
    largest step. Logits, which are float32, are timed for few rows only (`_MOST_LOGITS`). folder: where choices are
    kept; None keeps none. Returns the times of all sizes, also of saved ones: an empty list without cuBLASLt.
    """
    groups: dict[_Group, list[TunableLinear]] = {}
    for linear, use in uses:
        if _can_choose(linear, use):
            groups.setdefault((use, linear.weight.shape), []).append(linear)
    if not groups:
        return []
    try:
        library = open_library()
    except (OSError, RuntimeError) as error:
        logger.warning("Matrix products are PyTorch's own: %s", error)
        return []
    began_s = clock()
    choices = {key: TunedGemm(library, key[0], linears[0].weight) for key, linears in groups.items()}
    cache = GemmCache(folder, library.identity)
    taken_us: dict[int, tuple[float, float]] = {}
    untimed: list[int] = []
    for rows, key in _in_order(groups, step_sizes, most_rows):
        problem = choices[key].problem(rows)
        choice = _saved(cache, library, problem)
        if choice is None:
            if clock() - began_s > LIMIT_S:
                untimed.append(rows)
                continue
            choice = _fastest(library, problem, key[0], groups[key], times or gpu_times)
            cache.add(problem, choice)
        own_us, chosen_us, algorithm = choice
        choices[key].choose(rows, algorithm)
        before, count = taken_us.get(rows, (0.0, 0.0)), len(groups[key])
        taken_us[rows] = before[0] + count * own_us, before[1] + count * chosen_us
    if untimed:
        sizes = ", ".join(map(str, dict.fromkeys(untimed)))
        logger.warning("It takes too long: products of %s rows are not timed, and stay PyTorch's own", sizes)
    cache.save()
    for key, linears in groups.items():
        for linear in linears:
            linear.tuned = choices[key]
    gain = statistics.mean(1 - chosen / own for own, chosen in taken_us.values()) if taken_us else 0.0
    logger.info("Chose matrix products in %.1f s: %.1f%% less time", clock() - began_s, 100 * gain)
    return [TuneResult(rows, *taken) for rows, taken in sorted(taken_us.items())]


def _saved(cache: GemmCache, library: GemmLibrary, problem: GemmProblem) -> GemmChoice | None:
    """The saved choice for a product, if the library still has its algorithm."""
    choice = cache.find(problem)
    if choice is None or choice.algorithm is None or library.product(problem, choice.algorithm) is not None:
        return choice
    return None


def gpu_times(runs: Sequence[Sequence[Call]], rounds: int) -> list[float]:
    """The `Times` of the current GPU, by its events."""
    marks = [[_mark(), _mark()] for _ in range(rounds * len(runs))]
    for number, (begin, end) in enumerate(marks):
        calls = runs[number % len(runs)]
        # The GPU sleeps until the host has launched the calls: otherwise the host's time would be measured.
        torch.cuda._sleep(15_000 * len(calls))
        begin.record()
        for call in calls:
            call()
        end.record()
    torch.cuda.synchronize()
    taken = [begin.elapsed_time(end) * 1e3 for begin, end in marks]
    return [statistics.median(taken[first :: len(runs)]) for first in range(len(runs))]


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _can_choose(linear: TunableLinear, use: Epilogue) -> bool:
    """Whether cuBLASLt's algorithms suit the weight. Float32 weights are left to PyTorch, whose sums they keep."""
    weight = linear.weight
    if weight.dtype not in (torch.bfloat16, torch.float16) or linear.bias is not None:
        return False
    aligned = all(size * weight.itemsize % ALIGNMENT_BYTES == 0 for size in weight.shape)
    return aligned and weight.data_ptr() % ALIGNMENT_BYTES == 0 and weight.is_contiguous()


def _in_order(groups: Iterable[_Group], step_sizes: Sequence[int], most_rows: int) -> list[tuple[int, _Group]]:
    """The sizes to time with the groups to time for each, the most useful first.

    A size that is not reached in time uses PyTorch's own, or the choice of the next larger size. That choice suits many
    rows better than few.
    """
    most = max(step_sizes)
    large = sorted((size for size in {*_LARGE_SIZES, most_rows} if most < size <= most_rows), reverse=True)
    small = sorted((size for size in set(step_sizes) if size > 1), key=lambda size: (size % 64 != 0, size))
    logits = min(most, _MOST_LOGITS)
    return [
        (rows, group)
        for rows in large + small
        for group in groups
        if group[0] is not Epilogue.FLOAT32 or rows <= logits
    ]


def _fastest(
    library: GemmLibrary, problem: GemmProblem, use: Epilogue, linears: Sequence[TunableLinear], times: Times
) -> GemmChoice:
    """Times PyTorch's own product and those of all candidates."""
    weight_bytes = linears[0].weight.nbytes
    count = 1 if problem.rows > _LONG_ROWS else min(max(_RUN_BYTES // weight_bytes, 1), _MOST_CALLS)
    own = [linears[index % len(linears)] for index in range(count)]
    x = torch.randn(problem.rows, problem.in_size, dtype=problem.dtype, device=own[0].weight.device)
    out = x.new_zeros(problem.rows, problem.out_size, dtype=problem.out_dtype)

    def run(product: Product) -> list[Call]:
        return [partial(product, x, linear.weight, out) for linear in own]

    own_run: list[Call] = [partial(_by_pytorch, use, x, linear, out) for linear in own]
    own_run[0]()
    usable = []
    for algorithm in _candidates(library, problem):
        product = library.product(problem, algorithm)
        if product is not None and _runs(partial(product, x, own[0].weight, out)):
            usable.append((algorithm, product))
    brief = problem.rows <= _LONG_ROWS
    screened = times([run(product) for _, product in usable], 2 if brief else 1) if usable else []
    # The fastest are timed again, for more rounds, and their results are checked.
    some = slice(None, None, max(1, problem.rows // 64))
    wanted = own[0].in_float32(x[some].contiguous())
    finalists: list[tuple[Algorithm, Product]] = []
    for index in sorted(range(len(usable)), key=screened.__getitem__):
        if len(finalists) < _FINALISTS and _agrees(partial(usable[index][1], x, own[0].weight), out, some, wanted):
            finalists.append(usable[index])
    own_us, *others_us = times([own_run, *(run(product) for _, product in finalists)], 9 if brief else 3)
    best_us = min(others_us, default=own_us)
    if best_us > own_us * (1 - LEAST_GAIN):
        return GemmChoice(own_us / count, own_us / count, None)
    return GemmChoice(own_us / count, best_us / count, finalists[others_us.index(best_us)][0])


def _candidates(library: GemmLibrary, problem: GemmProblem) -> list[Algorithm]:
    try:
        return library.candidates(problem)
    except RuntimeError as error:
        logger.debug("No candidates for %s: %s", problem, error)
        return []


def _by_pytorch(use: Epilogue, x: torch.Tensor, linear: TunableLinear, out: torch.Tensor) -> None:
    if use is Epilogue.PLAIN:
        linear(x)
    elif use is Epilogue.ADDED:
        linear.add_to(out, x)
    else:
        linear.in_float32(x, out)


def _runs(product: Call) -> bool:
    try:
        product()
    except RuntimeError as error:
        logger.debug("%s", error)
        return False
    return True


def _agrees(product: Callable[[torch.Tensor], None], out: torch.Tensor, some: slice, wanted: torch.Tensor) -> bool:
    """Whether the product gives the rows `some` of `out` the values `wanted`, up to `_TOLERANCE`. Leaves `out` zero."""
    out.zero_()
    product(out)
    wrong = bool((out[some] - wanted).norm() > _TOLERANCE * wanted.norm())
    out.zero_()
    if wrong:
        logger.warning("A product of cuBLASLt, %s, comes out wrong: it is not used", tuple(out.shape))
    return not wrong
