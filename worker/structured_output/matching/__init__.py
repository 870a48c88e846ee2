"""Grammars that outputs follow: states of sequences, and masks of allowed tokens.

Owns the choice between xgrammar and llguidance, their matchers, the batch of a step with its threads, and
`uniqueItems`, which no grammar says. Knows nothing of schemas' conversion and of processes. Read `engines.py` first,
then `state.py` and `batch.py`.
"""
