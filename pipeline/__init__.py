"""How much work goes into a micro-batch.

Owns: the size of a chunk (`chunk.py`). Knows tokens and sequences, not which model they run through.
"""
