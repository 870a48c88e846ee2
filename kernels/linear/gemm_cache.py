"""Choices of `kernels.linear.gemm_autotune` on disk.

A choice is cuBLASLt's own description of an algorithm, which is valid for the same version of cuBLASLt on the same kind
of GPU (https://docs.nvidia.com/cuda/cublas/#cublasltmatmulalgo-t). So the library's `identity` names the file.
"""

from typing import Any, NamedTuple

from kernels.choice_cache import ChoiceCache
from kernels.linear.cublaslt import Algorithm, GemmProblem


class GemmChoice(NamedTuple):
    """The result of timing one product: microseconds of PyTorch's own algorithm and of the fastest, and the fastest;
    None if that is PyTorch's own."""

    own_us: float
    chosen_us: float
    algorithm: Algorithm | None


class GemmCache(ChoiceCache[GemmChoice]):
    """The choices for one kind of GPU and version of cuBLASLt."""

    what = "matrix products"

    def find(self, problem: GemmProblem) -> GemmChoice | None:
        """The choice for a product; None if it has not been timed."""
        return self._found(_key(problem))

    def add(self, problem: GemmProblem, choice: GemmChoice) -> None:
        """Keeps the choice for a product."""
        self._add(_key(problem), choice)

    @staticmethod
    def _saved(choice: GemmChoice) -> Any:
        own_us, chosen_us, algorithm = choice
        return own_us, chosen_us, None if algorithm is None else algorithm.hex()

    @staticmethod
    def _restored(saved: Any) -> GemmChoice:
        own_us, chosen_us, hexed = saved
        return GemmChoice(float(own_us), float(chosen_us), None if hexed is None else bytes.fromhex(hexed))


def _key(problem: GemmProblem) -> str:
    kept = "adds" if problem.adds else "replaces"
    dtypes = (str(dtype).removeprefix("torch.") for dtype in (problem.dtype, problem.out_dtype))
    return "-".join((f"{problem.rows}x{problem.out_size}x{problem.in_size}", *dtypes, kept))
