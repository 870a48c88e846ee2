"""One replica: the scheduler, the step, the models, sampling, grammars, and the messages that it speaks.

A replica is one scheduler and one process a rank. Owns: a request from its arrival on the socket to its last token.
Knows nothing of HTTP or of other replicas. Read `engine.py` first, then `scheduler.py`.
"""
