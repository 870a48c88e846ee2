"""Correctness of a replica's outputs compared with transformers, and the loss of quality at lower precision.

Read `exactness.py` first, then `reference.py`, which makes the models and the expected outputs. `families.py`
has a model of every family, in the sizes of this check and of tests.
"""
