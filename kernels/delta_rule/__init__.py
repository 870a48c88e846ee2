"""The gated delta rule, a linear attention over recurrent states.

Owns the rule (`chunked.py` in PyTorch; `decode_kernels.py` and `chunk_kernels.py` in Triton) and the norm after it.
Knows no model and no pages. Read `rule.py` first.
"""
