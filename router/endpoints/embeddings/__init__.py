"""Embeddings, rankings and scores: sequences that generate nothing.

Owns the routes, the inputs of each, and the answers made of a model's hidden states. How hidden states become vectors
is known to `router.prepare.pooling`. Read `routes.py` first, then `embeddings.py`.
"""
