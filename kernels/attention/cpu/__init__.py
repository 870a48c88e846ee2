"""Decode attention on CPUs, compiled by numba.

Owns the kernel (`decode_kernel.py`) and the choice of chunks that it computes. Read `numba_backend.py` first.
"""
