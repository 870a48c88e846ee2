"""The state space duality of Mamba2, a linear attention with decays over recurrent states.

Owns the recurrence and the gates of its outputs (`chunked.py` in PyTorch; `decode_kernels.py` and `chunk_kernels.py` in
Triton). Knows no model and no pages. Read `recurrence.py` first.
"""
