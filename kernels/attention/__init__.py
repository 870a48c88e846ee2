"""Attention over the pages of a KV cache.

Owns the interface (`plan` once a step, `run` once a layer) and its implementations. A rank's implementation is chosen
in `worker/executor/attention_selector.py`. Read `interface.py` first, then `torch_backend.py`, the plain one.
"""
