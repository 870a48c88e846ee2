"""Matrix products with cuBLASLt by an algorithm that the caller chooses, which PyTorch's own products do not offer.

Calls the library that PyTorch has loaded (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api). Sums are in
float32. `kernels.linear.gemm_autotune` says what the choice gives.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

Algorithm = bytes
"""cuBLASLt's own description of an algorithm."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Computes a `GemmProblem` for (x, weight, out), launched on the current stream. Raises RuntimeError if cuBLASLt
refuses. All products share one workspace, so no two may run at once."""

WORKSPACE_BYTES = 32 << 20
MAJOR_VERSIONS = (12, 13)
"""Versions of cuBLASLt that have the constants below."""

ALIGNMENT_BYTES = 256
"""Alignment of all three matrices and of their rows, which the fastest algorithms require."""

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_FLOAT32_SUMS = 68
_TRANSPOSED_A = 3
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_SPLITS, _REDUCTION = 2, 3
# Parts of a split sum are kept in float32, and added in a fixed order.
_REDUCED_IN_FLOAT32 = 2

_MOST_CANDIDATES = 16
# A product of few rows has too few tiles to occupy a GPU. Up to `_SPLIT_ROWS` rows, the first `_SPLIT_ALGORITHMS`
# algorithms are also tried with the sum in `_PARTS` parts (split-K).
_SPLIT_ROWS = 512
_SPLIT_ALGORITHMS = 3
_PARTS = (1, 2, 3, 4)


class GemmProblem(NamedTuple):
    """The product `x @ weight.T` of x `[rows, in_size]` and weight `[out_size, in_size]`, contiguous and of `dtype`.
    The result, `[rows, out_size]` of `out_dtype`, replaces the output or, if `adds`, is added to it."""

    rows: int
    out_size: int
    in_size: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    adds: bool


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """The cuBLASLt library, on the current GPU."""

    def __init__(self) -> None:
        """Raises OSError or RuntimeError if PyTorch uses no cuBLASLt, or a version that is not in `MAJOR_VERSIONS`."""
        self._library = ctypes.CDLL(_path())
        version = self._library.cublasLtGetVersion
        version.restype = ctypes.c_size_t
        if version() // 10000 not in MAJOR_VERSIONS:
            raise OSError(f"cuBLASLt {version()} is not known")
        self.identity = f"{torch.cuda.get_device_name()}-cublaslt{version()}"
        self._matmul = self._library.cublasLtMatmul
        self._matmul.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]
        self._device = torch.cuda.current_device()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._layouts: dict[tuple[torch.dtype, int, int], int] = {}
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._handle = self._created("cublasLtCreate")
        # cuBLAS stores matrices by columns: to it the weight is `[in, out]`, x `[in, rows]` and out `[out, rows]`.
        self._operation = self._created("cublasLtMatmulDescCreate", ctypes.c_int(_FLOAT32_SUMS), ctypes.c_int(0))
        self._set("cublasLtMatmulDescSetAttribute", self._operation, _TRANSPOSED_A, ctypes.c_int32(1))
        self._preference = self._created("cublasLtMatmulPreferenceCreate")
        for attribute, value in (
            (_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES)),
            (_REDUCTIONS, ctypes.c_uint32(_REDUCED_IN_FLOAT32)),
            *((alignment, ctypes.c_uint32(ALIGNMENT_BYTES)) for alignment in _ALIGNMENTS),
        ):
            self._set("cublasLtMatmulPreferenceSetAttribute", self._preference, attribute, value)

    def candidates(self, problem: GemmProblem) -> list[Algorithm]:
        """Algorithms that may be fast, in the order of cuBLASLt's heuristic, then some of them with split sums."""
        found, count = (_Heuristic * _MOST_CANDIDATES)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            *self._described(problem),
            ctypes.c_void_p(self._preference),
            ctypes.c_int(_MOST_CANDIDATES),
            found,
            ctypes.byref(count),
        )
        algorithms = [bytes(each.algorithm) for each in found[: count.value] if each.state == 0]
        if problem.rows <= _SPLIT_ROWS:
            algorithms += [
                split
                for algorithm in algorithms[:_SPLIT_ALGORITHMS]
                for parts in _PARTS
                if (split := self._split(algorithm, parts)) is not None
            ]
        return list(dict.fromkeys(algorithms))

    def product(self, problem: GemmProblem, algorithm: Algorithm) -> Product | None:
        """The problem's product by `algorithm`; None if the algorithm does not support the problem."""
        chosen = (ctypes.c_uint64 * 8).from_buffer_copy(algorithm)
        checked = _Heuristic()
        arguments = (*self._described(problem), chosen, ctypes.byref(checked))
        status = self._library.cublasLtMatmulAlgoCheck(*arguments)
        if status != 0 or checked.state != 0 or checked.workspace > WORKSPACE_BYTES:
            return None
        matmul, handle, operation, device = self._matmul, self._handle, self._operation, self._device
        weights, xs, outs = self._layouts_of(problem)
        one = ctypes.addressof(self._one)
        kept = ctypes.addressof(self._one if problem.adds else self._zero)
        workspace, stream = self._workspace, torch._C._cuda_getCurrentRawStream

        def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            at = out.data_ptr()
            status = matmul(
                handle,
                operation,
                one,
                weight.data_ptr(),
                weights,
                x.data_ptr(),
                xs,
                kept,
                at,
                outs,
                at,
                outs,
                chosen,
                workspace.data_ptr(),
                WORKSPACE_BYTES,
                stream(device),
            )
            if status != 0:
                raise RuntimeError(f"cublasLtMatmul: status {status} for {problem}")

        return run

    def _split(self, algorithm: Algorithm, parts: int) -> Algorithm | None:
        """The same algorithm with the sum in `parts` parts; None if it does not support that."""
        split = (ctypes.c_uint64 * 8).from_buffer_copy(algorithm)
        for attribute, value in (
            (_SPLITS, ctypes.c_int32(parts)),
            (_REDUCTION, ctypes.c_uint32(_REDUCED_IN_FLOAT32 if parts > 1 else 0)),
        ):
            if self._library.cublasLtMatmulAlgoConfigSetAttribute(
                split, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
            ):
                return None
        return bytes(split)

    def _described(self, problem: GemmProblem) -> list[ctypes.c_void_p]:
        weight, x, out = self._layouts_of(problem)
        return [ctypes.c_void_p(each) for each in (self._handle, self._operation, weight, x, out, out)]

    def _layouts_of(self, problem: GemmProblem) -> tuple[int, int, int]:
        """The layouts of weight, x and out."""
        return (
            self._layout(problem.dtype, problem.in_size, problem.out_size),
            self._layout(problem.dtype, problem.in_size, problem.rows),
            self._layout(problem.out_dtype, problem.out_size, problem.rows),
        )

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> int:
        if (layout := self._layouts.get((dtype, rows, columns))) is None:
            layout = self._layouts[dtype, rows, columns] = self._created(
                "cublasLtMatrixLayoutCreate",
                ctypes.c_int(_TYPES[dtype]),
                ctypes.c_uint64(rows),
                ctypes.c_uint64(columns),
                ctypes.c_int64(rows),
            )
        return layout

    def _created(self, name: str, *arguments: object) -> int:
        """A handle from the library's function `name`. It is never destroyed: it lives as long as the process."""
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        assert made.value is not None
        return made.value

    def _set(self, name: str, of: int, attribute: int, value: ctypes._SimpleCData) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call(name, ctypes.c_void_p(of), ctypes.c_int(attribute), ctypes.byref(value), size)

    def _call(self, name: str, *arguments: object) -> None:
        if (status := getattr(self._library, name)(*arguments)) != 0:
            raise RuntimeError(f"{name}: status {status}")


def _path() -> str:
    """The file of the library that PyTorch's own products use. Raises OSError if there is none."""
    some = torch.ones(8, 8, device="cuda")
    torch.mm(some, some)  # the first product loads the library
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libcublasLt.so"):
            return path[0]
    raise OSError("PyTorch has loaded no cuBLASLt")
