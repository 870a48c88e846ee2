"""Programs of the language, and what its runtime saves them.

Owns: a command for each comparison of programs with plain calls, and a scripted endpoint for those that need no model.
Knows the language (`shoal.lang`), not the server behind it. Read `against_raw.py` first.
"""
