"""The gated delta rule, a linear attention, and the short convolution before it, over states that last from step to
step.

Owns the layout of the states (`states.py`) and their operators: `chunked.py` has the rule, `torch_states.py` the plain
PyTorch way to run a step. Knows no model and no pages. Read `states.py` first.
"""
