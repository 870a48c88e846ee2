"""Products of low-rank adapters (LoRA), for batches whose tokens have different adapters: grouped by adapter, added to
the product of the base weight.

Read `lora_weights.py` first; `segments.py` groups the tokens, and `segmented_kernels.py` has the Triton kernels.
"""
