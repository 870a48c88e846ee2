"""From JSON schemas to grammars whose every text validates.

Owns the grammars of JSON's values, the schema converter, and schemas without what no grammar enforces. Knows nothing of
tools and of tokens. Read `schema.py` first, then `values.py`.
"""
