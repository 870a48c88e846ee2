"""Answers of models, read: thinking and calls of tools, by formats that are data and one lexer for all of them.

Owns the choice of a model's format, and the parsing of an answer into the deltas of `router/chat/deltas.py`. The
formats of families are those of `worker.formats`. Knows nothing of HTTP and of protocols. Read `format.py` first, then
`lexer.py`.
"""
