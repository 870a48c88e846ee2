"""From logits to tokens: penalties and biases, grammar bitmasks, top-k, top-p and min-p, log probabilities.

Owns the state of a sequence that sampling needs, by slot. Knows no schedule. Read `sampler.py` first, then
`sampling_metadata.py`.
"""
