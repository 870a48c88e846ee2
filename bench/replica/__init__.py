"""Benchmarks of a single replica: in this process, in a child process, or behind a server.

Owns the offline workloads, models of known shapes with random weights, and the measurement of a replica's steps. Read
`gpu.py` first, then `replica.py`.
"""
