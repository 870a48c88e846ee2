"""Programs of the language, and what its runtime saves them.

Owns: a command for each comparison of programs with plain calls, for many states at once and for a lost replica, and
endpoints for those that need no model.
Knows the language (`shoal.lang`), not the server behind it. Read `against_raw.py` first.
"""
