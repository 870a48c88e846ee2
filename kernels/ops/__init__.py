"""The operators between attention and the matrix products, alone and fused, and the argmax of greedy decoding.

Each has a PyTorch version for CPUs. Read `norm.py` first, then `fused.py`, which does the same in fewer launches.
"""
