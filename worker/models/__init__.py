"""Decoder-only transformers: one decoder, and a module for each family that says how it differs from a Llama.

Owns a model's sizes (`config.py`), the layer (`layer.py`: this is the model), the ways to run layers
(`residual_stream.py`, `decoder.py`), which part of every weight a rank holds (`parameters.py`, `sharding.py`), and what
a family has to say of itself (`family.py`; the families are in `families/`).
Knows no pages and no requests. Read `layer.py` first.
"""
