"""Micro-batches: what goes into the next one, how long it takes, and why stages are idle.

| file | what it owns |
| --- | --- |
| `schedule.py`, `policy.py` | the schedules by name, and their interface to the scheduler |
| `uniform.py`, `offline.py`, `fixed_chunk.py` | the schedules |
| `budget.py`, `chunk.py`, `padding.py` | the number of tokens of a micro-batch |
| `cost.py`, `shape.py`, `roofline.py`, `regression.py` | the time of a micro-batch, predicted and learned |
| `stages.py`, `stage_backlog.py`, `meter.py` | the layers of a stage, its backlog, its idle time |

The package knows tokens, sequences and sizes of layers, but no tensors. Read `schedule.py` first.
"""
