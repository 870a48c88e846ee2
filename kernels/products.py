"""Which of cuBLASLt's algorithms is fastest for a product with a weight, found out by timing them. PyTorch takes the
one that cuBLAS holds to be fastest without a look.

What is chosen holds as long as the process: the same rows of the same batch size always come out the same.
"""

import bisect
import enum
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from kernels.cublaslt import ALIGNMENT_BYTES, Algorithm, CublasLt, Problem, Product

if TYPE_CHECKING:
    from kernels.linear import Linear

logger = logging.getLogger(__name__)

Call = Callable[[], object]
Times = Callable[[Sequence[Sequence[Call]], int], list[float]]
"""(runs, rounds) to microseconds: each run is calls that are launched one after the other, and takes the median of so
many rounds, in which the runs take turns."""

LIMIT_S = 16.0
"""After this long, what has not been timed is left to PyTorch. An 8B model takes 5 s on a machine that has just been
started and reads its libraries from a disk; a stage of 20 layers of a 70B model with the head and 1,024 slots, 9 s."""

LEAST_GAIN = 0.015
"""So much less time than PyTorch's own product is needed for another."""

# Chunks of prompts and the decodes beside them come in all sizes: these are timed, up to a step's largest. The rows
# between are few enough that the same tiles do.
_LARGE_SIZES = (512, 1024, 2048, 4096, 6144, 8192)
# The product that logits come from is of the largest matrix of all: to time more rows of it takes seconds. At this many
# PyTorch's own takes up to a tenth longer than the fastest (70B, 8B, Qwen3-0.6B; H200), which is one product of a step.
_MOST_LOGITS = 256
# What is chosen for a size serves fewer rows down to this part of it.
_REACH = 0.75

_RUN_BYTES = 400 << 20  # of weights that a run reads: about 0.1 ms
_MOST_CALLS = 16
_LONG_ROWS = 1024  # beyond, one call is a run
_FINALISTS = 3
_TOLERANCE = 0.01


class Use(enum.Enum):
    """What becomes of a product: `PLAIN`, it is of the dtype of its factors; `ADDED`, it is added to such a matrix;
    `FLOAT32`, it stays as it was summed up."""

    PLAIN = "plain"
    ADDED = "added"
    FLOAT32 = "float32"


class Library(Protocol):
    """`kernels.cublaslt.CublasLt`, whose docstrings hold."""

    def candidates(self, problem: Problem) -> list[Algorithm]: ...

    def product(self, problem: Problem, algorithm: Algorithm) -> Product | None: ...


class Choices:
    """For weights of one shape and one use: what is faster than PyTorch for so many rows."""

    def __init__(self, library: Library, use: Use, weight: torch.Tensor) -> None:
        self.use = use
        self._library, self._shape, self._dtype = library, weight.shape, weight.dtype
        self._sizes: list[int] = []
        self._algorithms: dict[int, Algorithm | None] = {}
        self._products: dict[int, Product | None] = {}

    def problem(self, rows: int) -> Problem:
        out_dtype = torch.float32 if self.use is Use.FLOAT32 else self._dtype
        out_size, in_size = self._shape
        return Problem(rows, out_size, in_size, self._dtype, out_dtype, self.use is Use.ADDED)

    def choose(self, rows: int, algorithm: Algorithm | None) -> None:
        """None is PyTorch's own. Before the first `find`."""
        bisect.insort(self._sizes, rows)
        self._algorithms[rows] = algorithm

    def find(self, rows: int) -> Product | None:
        """None if PyTorch's own product is to be taken."""
        try:
            return self._products[rows]
        except KeyError:
            found = self._products[rows] = self._found(rows)
            return found

    def _found(self, rows: int) -> Product | None:
        index = bisect.bisect_left(self._sizes, rows)
        if index == len(self._sizes) or rows < _REACH * self._sizes[index]:
            return None
        algorithm = self._algorithms[self._sizes[index]]
        return None if algorithm is None else self._library.product(self.problem(rows), algorithm)


_Group = tuple[Use, torch.Size]
"""Linear layers of one use and shape."""


class Timed(NamedTuple):
    """What all products of a step of so many rows take with PyTorch's own ones, and with what was chosen."""

    rows: int
    own_us: float
    chosen_us: float


def choose(
    uses: Iterable[tuple["Linear", Use]],
    step_sizes: Sequence[int],
    most_rows: int,
    open_library: Callable[[], Library] = CublasLt,
    times: Times | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Timed]:
    """Time the products of a model's linear layers, each with what its product is used for, and have them take the
    fastest. Steps of a number of rows in `step_sizes` come most often, and larger ones have up to `most_rows`; logits,
    in float32, are of few rows. Returns what was timed; nothing without cuBLASLt.
    """
    groups: dict[_Group, list[Linear]] = {}
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
    choices = {key: Choices(library, key[0], linears[0].weight) for key, linears in groups.items()}
    taken_us: dict[int, tuple[float, float]] = {}
    for rows, key in _in_order(groups, step_sizes, most_rows):
        if clock() - began_s > LIMIT_S:
            logger.warning("It takes too long: products of %d rows, and what was to come after, are not timed", rows)
            break
        problem = choices[key].problem(rows)
        own_us, chosen_us, algorithm = _fastest(library, problem, key[0], groups[key], times or gpu_times)
        choices[key].choose(rows, algorithm)
        before, count = taken_us.get(rows, (0.0, 0.0)), len(groups[key])
        taken_us[rows] = before[0] + count * own_us, before[1] + count * chosen_us
    for key, linears in groups.items():
        for linear in linears:
            linear.choices = choices[key]
    gain = statistics.mean(1 - chosen / own for own, chosen in taken_us.values()) if taken_us else 0.0
    logger.info("Chose matrix products in %.1f s: %.1f%% less time", clock() - began_s, 100 * gain)
    return [Timed(rows, *taken) for rows, taken in sorted(taken_us.items())]


def gpu_times(runs: Sequence[Sequence[Call]], rounds: int) -> list[float]:
    """`Times` of the current GPU."""
    marks = [[_mark(), _mark()] for _ in range(rounds * len(runs))]
    for number, (begin, end) in enumerate(marks):
        calls = runs[number % len(runs)]
        # While the GPU is kept waiting the host gets ahead, so that it is not the host's time that is taken.
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


def _can_choose(linear: "Linear", use: Use) -> bool:
    """Float32 is left as it is: there every sum is to be PyTorch's."""
    weight = linear.weight
    if weight.dtype not in (torch.bfloat16, torch.float16) or linear.bias is not None:
        return False
    aligned = all(size * weight.itemsize % ALIGNMENT_BYTES == 0 for size in weight.shape)
    return aligned and weight.data_ptr() % ALIGNMENT_BYTES == 0 and weight.is_contiguous()


def _in_order(groups: Iterable[_Group], step_sizes: Sequence[int], most_rows: int) -> list[tuple[int, _Group]]:
    """What to time, the rows that matter most first: if time runs out, the others are left to PyTorch, or to what was
    chosen for the next larger, which serves many rows better than few."""
    most = max(step_sizes)
    large = sorted((size for size in {*_LARGE_SIZES, most_rows} if most < size <= most_rows), reverse=True)
    small = sorted((size for size in set(step_sizes) if size > 1), key=lambda size: (size % 64 != 0, size))
    logits = min(most, _MOST_LOGITS)
    return [
        (rows, group) for rows in large + small for group in groups if group[0] is not Use.FLOAT32 or rows <= logits
    ]


def _fastest(
    library: Library, problem: Problem, use: Use, linears: Sequence["Linear"], times: Times
) -> tuple[float, float, Algorithm | None]:
    """Microseconds of PyTorch's own product and of the fastest, and which that is; None is PyTorch's own."""
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
    # Those that are fast are looked at more closely.
    some = slice(None, None, max(1, problem.rows // 64))
    wanted = own[0].in_float32(x[some].contiguous())
    finalists: list[tuple[Algorithm, Product]] = []
    for index in sorted(range(len(usable)), key=screened.__getitem__):
        if len(finalists) < _FINALISTS and _agrees(partial(usable[index][1], x, own[0].weight), out, some, wanted):
            finalists.append(usable[index])
    own_us, *others_us = times([own_run, *(run(product) for _, product in finalists)], 9 if brief else 3)
    best_us = min(others_us, default=own_us)
    if best_us > own_us * (1 - LEAST_GAIN):
        return own_us / count, own_us / count, None
    return own_us / count, best_us / count, finalists[others_us.index(best_us)][0]


def _candidates(library: Library, problem: Problem) -> list[Algorithm]:
    try:
        return library.candidates(problem)
    except RuntimeError as error:
        logger.debug("No candidates for %s: %s", problem, error)
        return []


def _by_pytorch(use: Use, x: torch.Tensor, linear: "Linear", out: torch.Tensor) -> None:
    if use is Use.PLAIN:
        linear(x)
    elif use is Use.ADDED:
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
    """Whether it makes some of the rows of `out` what they should be. Leaves `out` zero."""
    out.zero_()
    product(out)
    wrong = bool((out[some] - wanted).norm() > _TOLERANCE * wanted.norm())
    out.zero_()
    if wrong:
        logger.warning("A product of cuBLASLt, %s, comes out wrong: it is not used", tuple(out.shape))
    return not wrong
