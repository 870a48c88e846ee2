"""All-reduce over the GPUs of one machine, through memory that they open to each other.

Owns the kernel that adds, and the CUDA IPC handles. `worker/parallel/custom_all_reduce.py` finds out whether a machine
supports it. Read `all_reduce.py` first.
"""
