"""Grammars as rules, and the notations in which the two engines read them.

Owns the tree of a grammar, patterns of clients in the engines' notation, and the translation to llguidance's Lark.
Knows nothing of JSON. Read `ebnf.py` first, then `regex.py`.
"""
