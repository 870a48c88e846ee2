"""Runs functions that numba compiled on PyTorch's own CPU threads.

The threads of a second pool would compete with PyTorch's, which spin between operators. So the OpenMP runtime that
PyTorch has loaded runs the function, on the threads that it keeps anyway.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba.core.ccallback import CFunc


def run(function: CFunc, arguments: np.ndarray) -> None:
    """Call `function`, a `void (int64_t *)`, with `arguments` (int64, contiguous) once in each of PyTorch's threads.

    All calls get the same arguments, and divide the work with `kernels.intrinsics.claim`. Returns when
    all calls have returned. Without a known OpenMP runtime there is one call, in this thread.
    """
    threads = torch.get_num_threads()
    start = _openmp_start() if threads > 1 else None
    if start is None:
        function.ctypes(arguments.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))
    else:
        start(function.address, arguments.ctypes.data, threads, 0)


@cache
def _openmp_start() -> Callable[[int | None, int, int, int], None] | None:
    """The entry into a parallel region in libgomp's ABI, which LLVM's and Intel's runtimes have as well; None if no
    runtime with it is loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "omp" in line.rsplit("/", 1)[-1]}
    for path in sorted(paths):
        if hasattr(library := ctypes.CDLL(path), "GOMP_parallel"):
            start = library.GOMP_parallel
            start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            start.restype = None
            return start
    return None
