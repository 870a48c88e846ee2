"""The execution of scheduled steps on devices: the model runner of one rank, and the ranks of one replica.

Owns weights, the KV cache's memory, page tables, CUDA graphs, and the processes of tensor and pipeline parallelism.
Knows no requests: a step arrives as a `worker.step.Plan`. Read `executor.py` first, then `loading.py`,
`model_runner.py` and `multi_rank.py`.
"""
