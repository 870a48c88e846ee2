"""The worth of predicted output lengths: how right their order is, and the gain from starting short outputs first.

`prompts.py` gathers prompts from public packages, `accuracy.py` compares predictions with a model's own outputs, and
`order.py` simulates queues. Read `accuracy.py` first.
"""
