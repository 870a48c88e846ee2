"""Decoder-only transformers: one decoder, and a table that says how each family differs from it.

Owns a model's sizes (`config.py`), the forward pass of its layers (`decoder.py`), and which part of every weight a rank
holds (`sharding.py`). Knows no pages and no requests. Read `config.py` first.
"""
