"""The worth of predicted output lengths: how right their order is, and the gain from starting short outputs first.

`prompts.py` gathers prompts from public packages, `accuracy.py` compares predictions with a model's own outputs,
`order.py` and `samples.py` simulate queues, and `latency.py` serves the prompts on a CPU. Read `accuracy.py` first.
"""
