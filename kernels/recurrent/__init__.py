"""Recurrent states, which layers of linear attention have in place of keys and values, and the short convolution before
them or in place of them. They last from step to step.

Owns the layout of the states (`states.py`), the ways to run a step (`torch_states.py`, `triton_states.py`), and the
interface of the rules that update them (`recurrence.py`). Knows no rule, no model and no pages. Read `states.py` first.
"""
