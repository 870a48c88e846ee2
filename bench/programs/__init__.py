"""Programs of the language, and what its runtime saves them.

Owns: a command that compares ten workloads of programs with plain calls.
Knows the language (`shoal.lang`), not the server behind it. Read `against_raw.py` first.
"""
