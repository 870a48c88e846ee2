"""The operators of a layer. Each has one interface, and a version in plain PyTorch next to its kernels.

| folder | operators |
| --- | --- |
| `attention/` | paged attention: FlashInfer, Triton, and CPUs |
| `linear/` | matrix products: plain, fp8, one row, tuned by cuBLASLt |
| `experts/` | mixtures of experts: routing, grouped products |
| `ops/` | norms, activations, rotary positions, argmax, and fused versions |
| `comm/` | all-reduce over the GPUs of one machine |

Owns the arithmetic of a layer. Knows nothing of requests. Read `attention/interface.py` first.
"""
