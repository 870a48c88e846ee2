"""JSON Schema: what a schema means, whatever is done with it.

Owns drafts and references, and schemas made of schemas: conjunctions, negations, alternatives that exclude each other.
Knows nothing of grammars. Read `modern.py` first, then `combinations.py`.
"""
