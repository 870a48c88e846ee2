"""From a request's grammar to a compiled one: in a process that can be killed, kept in memory and on disk.

Owns the order of the conversions, limits of time and memory, the store, and the judgement of whole answers. Knows
nothing of sequences. Read `compiler.py` first, then `process.py` and `compilation.py`.
"""
