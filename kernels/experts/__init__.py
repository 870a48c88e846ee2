"""Mixtures of experts: which experts a token goes to (`choice.py`, `routing.py`), and the products of its experts
(`experts.py`).

Owns routing and the grouped matrix products, with the Triton kernels of both (`grouped.py`, `few_tokens.py`) and the
choice of their tiles (`tiles.py`, `autotune.py`). Knows no model and no attention. Read `experts.py` first.
"""
