"""How models write thinking and calls of tools: formats as data, and one lexer that reads them all.

Owns: the table of formats, the choice of a model's format from its chat template, and the parsing of an answer into the
deltas of `router/chat/deltas.py`. Knows nothing of HTTP and of protocols. Read `format.py` first, then `lexer.py`.
"""
