"""Attention and the other operators, each behind one interface with a plain PyTorch reference.

Owns: the arithmetic of a layer. Knows nothing of requests. Read `attention.py` first.
"""
