"""Decode attention on CPUs, compiled by numba.

Owns the kernel (`decode_kernel.py`), its threads (`openmp.py`) and its instructions (`intrinsics.py`). Read
`numba_backend.py` first.
"""
