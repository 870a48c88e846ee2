"""Decoder-only transformers: one decoder, and a table that says how each family differs from it.

Owns a model's sizes (`config.py`), the layer (`layer.py`: this is the model), the ways to run layers
(`residual_stream.py`, `decoder.py`), and which part of every weight a rank holds (`parameters.py`, `sharding.py`).
Knows no pages and no requests. Read `layer.py` first.
"""
