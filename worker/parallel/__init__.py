"""Communication between the ranks of one replica: collectives, custom all-reduce, sends between pipeline stages.

Owns the process groups. Knows tensors, and nothing of models or requests. Read `communicator.py` first.
"""
