"""The content of the next step: which sequences run, how many tokens of each, in which KV pages.

This room owns every sequence from arrival to its stop condition, the waiting queue, page allocation, preemption, and
the forecast of KV use that decides admission. It knows no tensors and no devices. Read `scheduler.py` first, then
`sequence_table.py`, whose columns are the state of all sequences.
"""
