"""Choices of `kernels.linear.gemm_autotune` on disk, so that only the first start on a kind of GPU times products.

A choice is cuBLASLt's own description of an algorithm, which is valid for the same version of cuBLASLt on the same kind
of GPU (https://docs.nvidia.com/cuda/cublas/#cublasltmatmulalgo-t). So the library's `identity` names the file.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import NamedTuple

from kernels.linear.cublaslt import Algorithm, GemmProblem

logger = logging.getLogger(__name__)


class GemmChoice(NamedTuple):
    """The result of timing one product: microseconds of PyTorch's own algorithm and of the fastest, and the fastest;
    None if that is PyTorch's own."""

    own_us: float
    chosen_us: float
    algorithm: Algorithm | None


class GemmCache:
    """The choices in one file of `folder`. Ranks of one machine may share it: the file of the last one to `save` stays,
    with the choices of those that it has read."""

    def __init__(self, folder: Path, identity: str) -> None:
        """`identity`: the kind of GPU and the version of cuBLASLt. A file that cannot be read counts as empty."""
        self._file = folder / (re.sub(r"[^A-Za-z0-9.]+", "_", identity) + ".json")
        self._choices: dict[str, GemmChoice] = _read(self._file)
        self._is_new = False

    def find(self, problem: GemmProblem) -> GemmChoice | None:
        """The choice for a product; None if it has not been timed."""
        return self._choices.get(_key(problem))

    def add(self, problem: GemmProblem, choice: GemmChoice) -> None:
        """Keeps the choice for a product."""
        self._choices[_key(problem)] = choice
        self._is_new = True

    def save(self) -> None:
        """Writes the file if a choice was added. Gives up with a warning if the folder cannot be written."""
        if not self._is_new:
            return
        choices = {
            key: [own_us, chosen_us, None if algorithm is None else algorithm.hex()]
            for key, (own_us, chosen_us, algorithm) in (_read(self._file) | self._choices).items()
        }
        half = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            half.write_text(json.dumps(choices))
            half.replace(self._file)
        except OSError as error:
            logger.warning("The choice of matrix products is not kept: %s", error)


def _key(problem: GemmProblem) -> str:
    kept = "adds" if problem.adds else "replaces"
    dtypes = (str(dtype).removeprefix("torch.") for dtype in (problem.dtype, problem.out_dtype))
    return "-".join((f"{problem.rows}x{problem.out_size}x{problem.in_size}", *dtypes, kept))


def _read(file: Path) -> dict[str, GemmChoice]:
    try:
        saved = json.loads(file.read_text())
        return {
            str(key): GemmChoice(float(own_us), float(chosen_us), None if hexed is None else bytes.fromhex(hexed))
            for key, (own_us, chosen_us, hexed) in saved.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s is ignored, and matrix products are timed again: %s", file, error)
        return {}
