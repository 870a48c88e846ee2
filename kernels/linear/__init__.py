"""Matrix products with weights that never change.

Owns the layouts of weights in memory, fp8, blocks of 4 and 8 bits, products with one row, and the autotuning of
cuBLASLt's algorithms. Read `linear.py` first.
"""
