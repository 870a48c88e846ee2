"""Benchmarks of the protocols around a model: what it costs a router to speak them.

Owns the benchmark of the parser of answers. Read `parser.py` first.
"""
