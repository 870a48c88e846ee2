"""Seeded faults: a measure of how much the tests find, taken before and after the tests themselves are changed.

`python -m tests.mutants` (`make mutants`) puts one fault at a time into a copy of the product, and runs the tests of
the package in which the fault is. Owns: the faults (`faults.py`), and the tool that runs tests on each
(`__main__.py`). `tests/test_mutants.py` keeps the list true to the code. Read `faults.py` first.
"""
