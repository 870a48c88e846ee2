"""Which algorithm a product takes: with a library and times that are made up, and on a GPU cuBLASLt's."""

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels.linear.cublaslt import Algorithm, CublasLt, GemmProblem, Product
from kernels.linear.gemm_autotune import LIMIT_S, Call, Epilogue, Times, TuneResult, autotune, gpu_times
from kernels.linear.linear import Linear

OUT_SIZE, IN_SIZE = 48, 32
FASTEST, FAST, REFUSED, WRONG = b"fastest", b"fast", b"refused", b"wrong"
# Microseconds, where PyTorch's own take 100.
TAKES_US = {FASTEST: 80.0, FAST: 90.0, REFUSED: 10.0, WRONG: 20.0}


class FakeLibrary:
    """Its products add a mark to what they compute: how they were asked for stays in `ran`."""

    identity = "a GPU-cublaslt130200"
    lacks: Algorithm | None = None

    def __init__(
        self, algorithms: Sequence[Algorithm], accepts: Callable[[GemmProblem], bool] = lambda problem: True
    ) -> None:
        self.algorithms, self._accepts = list(algorithms), accepts
        self.ran: list[tuple[Algorithm, GemmProblem]] = []

    def candidates(self, problem: GemmProblem) -> list[Algorithm]:
        if not self.algorithms:
            raise RuntimeError("nothing for that")
        return self.algorithms

    def product(self, problem: GemmProblem, algorithm: Algorithm) -> Product | None:
        if algorithm == self.lacks or not self._accepts(problem):
            return None
        return partial(self._run, algorithm, problem)

    def _run(
        self, algorithm: Algorithm, problem: GemmProblem, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert (len(x), *weight.shape, x.dtype, out.dtype) == problem[:-1]
        if algorithm == REFUSED:
            raise RuntimeError("refused")
        self.ran.append((algorithm, problem))
        product = x.float() @ weight.float().T * (2 if algorithm == WRONG else 1)
        out.copy_(out + product if problem.adds else product)


def fake_times(runs: Sequence[Sequence[Call]], rounds: int) -> list[float]:
    taken = []
    for calls in runs:
        run = calls[0]
        assert isinstance(run, partial)
        inner = run.func.args[0] if isinstance(run.func, partial) else run.args[0]
        taken.append(TAKES_US.get(inner, 100.0) * len(calls))
    return taken


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> list[Linear]:
    """Two layers of one shape, their weights as a GPU has them."""
    monkeypatch.setattr("kernels.linear.gemm_autotune.ALIGNMENT_BYTES", 16)  # a CPU's memory is not aligned by more
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    generator = torch.Generator().manual_seed(0)
    return [Linear(torch.randn(OUT_SIZE, IN_SIZE, generator=generator).bfloat16()) for _ in range(2)]


def chosen(
    linears: list[Linear],
    library: FakeLibrary,
    use: Epilogue = Epilogue.PLAIN,
    sizes: Sequence[int] = (8, 16),
    most_rows: int = 16,
    clock: Callable[[], float] = lambda: 0.0,
    folder: Path | None = None,
    times: Times = fake_times,
) -> list[TuneResult]:
    uses = [(linear, use) for linear in linears]
    results = autotune(uses, sizes, most_rows, lambda: library, times, clock, folder)
    library.ran.clear()
    return results


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, IN_SIZE, generator=torch.Generator().manual_seed(count)).bfloat16()


def test_the_fastest_that_is_right(linears: list[Linear], caplog: pytest.LogCaptureFixture) -> None:
    library = FakeLibrary([FAST, WRONG, REFUSED, FASTEST])
    with caplog.at_level(logging.INFO):
        assert chosen(linears, library) == [TuneResult(8, 200, 160), TuneResult(16, 200, 160)]
    assert "20.0% less time" in caplog.text
    assert "comes out wrong" in caplog.text
    x, out = rows_of(16), torch.empty(16, OUT_SIZE, dtype=torch.bfloat16)
    wanted = x.float() @ linears[1].weight.float().T
    torch.testing.assert_close(linears[1](x).float(), wanted, rtol=1e-2, atol=1e-2)
    assert linears[1](x, out) is out
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)
    problem = GemmProblem(16, OUT_SIZE, IN_SIZE, torch.bfloat16, torch.bfloat16, adds=False)
    assert library.ran == [(FASTEST, problem)] * 2


def never(runs: Sequence[Sequence[Call]], rounds: int) -> list[float]:
    raise AssertionError("timed again")


def test_the_next_start_times_nothing(linears: list[Linear], tmp_path: Path) -> None:
    library, folder = FakeLibrary([FAST, FASTEST]), tmp_path / "gemm"
    first = chosen(linears, library, folder=folder)
    assert [file.name for file in folder.iterdir()] == ["a_GPU_cublaslt130200.json"]
    again = FakeLibrary([])
    assert chosen(linears, again, folder=folder, times=never) == first
    linears[0](rows_of(16))
    assert [algorithm for algorithm, _ in again.ran] == [FASTEST]


def test_what_is_saved_elsewhere_or_not_understood_is_timed_again(
    linears: list[Linear], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = FakeLibrary([FAST])
    chosen(linears, library, folder=tmp_path)
    other = FakeLibrary([FASTEST])
    other.identity = "another GPU-cublaslt130200"
    assert chosen(linears, other, folder=tmp_path)[0].chosen_us == 160
    for text in ("{", '{"8x48x32-bfloat16-bfloat16-replaces": 3}', "[]"):
        for file in tmp_path.iterdir():
            file.write_text(text)
        caplog.clear()
        assert chosen(linears, other, folder=tmp_path)[0].chosen_us == 160
        assert "products are timed again" in caplog.text
    # An algorithm that the library does not have any more.
    chosen(linears, library, folder=tmp_path)
    fussy = FakeLibrary([FASTEST])
    fussy.lacks = FAST
    assert chosen(linears, fussy, folder=tmp_path)[0].chosen_us == 160


def test_a_folder_that_cannot_be_written_is_done_without(
    linears: list[Linear], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert chosen(linears, FakeLibrary([FAST]), folder=tmp_path / "file")[0].chosen_us == 180
    assert "is not kept" in caplog.text


def test_a_start_goes_on_where_the_last_one_had_no_time_left(linears: list[Linear], tmp_path: Path) -> None:
    moments = itertools.chain([0.0, 1.0], itertools.repeat(LIMIT_S + 1))
    assert len(chosen(linears, FakeLibrary([FAST]), clock=lambda: next(moments), folder=tmp_path)) == 1
    assert len(chosen(linears, FakeLibrary([FAST]), folder=tmp_path)) == 2


def test_a_sum_and_float32(linears: list[Linear]) -> None:
    library = FakeLibrary([FAST])
    chosen(linears[:1], library, Epilogue.ADDED)
    chosen(linears[1:], library, Epilogue.FLOAT32)
    x, residual = rows_of(8), torch.ones(8, OUT_SIZE, dtype=torch.bfloat16)
    linears[0].add_to(residual, x)
    torch.testing.assert_close(residual.float(), 1 + x.float() @ linears[0].weight.float().T, rtol=1e-2, atol=1e-2)
    assert [problem.adds for _, problem in library.ran] == [True]
    # Used in another way than was timed, it is PyTorch's.
    linears[0](x)
    linears[1](x)
    assert len(library.ran) == 1


def test_a_sum_by_the_algorithm_of_the_product(linears: list[Linear]) -> None:
    library = FakeLibrary([FAST])
    chosen(linears, library)
    x, residual = rows_of(8), torch.ones(8, OUT_SIZE, dtype=torch.bfloat16)
    linears[0].add_to(residual, x)
    torch.testing.assert_close(residual.float(), 1 + x.float() @ linears[0].weight.float().T, rtol=1e-2, atol=1e-2)
    assert [(name, problem.adds) for name, problem in library.ran] == [(FAST, True)]


@pytest.mark.parametrize("algorithms", [[], [REFUSED], [WRONG], [b"as fast"]])
def test_nothing_better_than_pytorch(linears: list[Linear], algorithms: list[Algorithm]) -> None:
    library = FakeLibrary(algorithms)
    assert chosen(linears, library) == [TuneResult(8, 200, 200), TuneResult(16, 200, 200)]
    assert linears[0](rows_of(8)).shape == (8, OUT_SIZE)
    assert library.ran == []


def test_rows_that_were_not_timed(linears: list[Linear]) -> None:
    """The next larger size's, unless they are far fewer, or the algorithm does not do so many."""
    library = FakeLibrary([FAST], lambda problem: problem.rows != 14)
    chosen(linears, library, sizes=(1, 8, 16), most_rows=1000)
    assert linears[0].tuned is not None
    taken = [rows for rows in range(1100) if linears[0].tuned.find(rows, Epilogue.PLAIN) is not None]
    assert taken == [6, 7, 8, 12, 13, 15, 16, *range(384, 513), *range(750, 1001)]


@pytest.mark.parametrize(("sizes", "timed"), [((8, 16), [8, 16]), ((8, 256, 512), [8, 256])])
def test_logits_are_of_few_rows(linears: list[Linear], sizes: Sequence[int], timed: list[int]) -> None:
    found = chosen(linears, FakeLibrary([FAST]), Epilogue.FLOAT32, sizes, most_rows=8192)
    assert [each.rows for each in found] == timed


def test_one_row_is_not_timed(linears: list[Linear]) -> None:
    assert chosen(linears, FakeLibrary([FAST]), sizes=(1,), most_rows=1) == []


def test_it_takes_too_long(linears: list[Linear], caplog: pytest.LogCaptureFixture) -> None:
    """What matters most comes first; the rest is served by what was chosen, or by PyTorch. It is said."""
    seconds = itertools.chain([0.0, 0.0, LIMIT_S], itertools.repeat(LIMIT_S + 1))
    timed = chosen(linears, FakeLibrary([FAST]), sizes=(24, 40, 56, 64), most_rows=64, clock=lambda: next(seconds))
    assert [each.rows for each in timed] == [24, 64]
    assert "products of 40, 56 rows are not timed" in caplog.text
    assert linears[0].tuned is not None
    assert linears[0].tuned.find(50, Epilogue.PLAIN) is not None
    assert linears[0].tuned.find(40, Epilogue.PLAIN) is None


def test_no_library(linears: list[Linear], caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> FakeLibrary:
        raise OSError("PyTorch has loaded no cuBLASLt")

    assert autotune([(linears[0], Epilogue.PLAIN)], (8,), 8, missing) == []
    assert "PyTorch has loaded no cuBLASLt" in caplog.text
    assert linears[0].tuned is None


def test_what_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    left = [
        Linear(torch.ones(16, 16)),
        Linear(torch.ones(16, 16).half(), torch.ones(16).half()),
        Linear(torch.ones(12, 16).half()),
        Linear(torch.ones(16, 20).half()),
    ]
    assert chosen(left, FakeLibrary([FAST])) == []
    assert all(linear.tuned is None for linear in left)


@pytest.mark.gpu
@pytest.mark.parametrize("use", list(Epilogue))
@pytest.mark.parametrize("rows", [8, 200, 1024])
def test_algorithms_of_cublaslt(rows: int, use: Epilogue) -> None:
    """Each in a graph, twice, against float64."""
    library = CublasLt()
    x, weight = (torch.randn(n, 512, device="cuda").bfloat16() for n in (rows, 1024))
    before = torch.randn(rows, 1024, device="cuda", dtype=torch.float32 if use is Epilogue.FLOAT32 else torch.bfloat16)
    wanted = x.double() @ weight.double().T + (before.double() if use is Epilogue.ADDED else 0)
    problem = GemmProblem(rows, 1024, 512, x.dtype, before.dtype, use is Epilogue.ADDED)
    algorithms = library.candidates(problem)
    assert algorithms
    for algorithm in algorithms:
        product = library.product(problem, algorithm)
        if product is None:
            continue
        out = before.clone()
        product(x, weight, out)
        once = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            product(x, weight, out)
        out.copy_(before)
        graph.replay()
        assert torch.equal(out, once)
        assert (out.double() - wanted).norm() < 3e-3 * wanted.norm()


@pytest.mark.gpu
def test_times_are_of_the_gpu() -> None:
    runs: list[list[Call]] = [[partial(torch.cuda._sleep, cycles)] * 2 for cycles in (100_000, 300_000)]
    short, long = gpu_times(runs, 3)
    assert 2 * short < long < 4 * short
