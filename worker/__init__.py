"""A replica: engine, scheduler, executor, sampling and structured output.

    engine -> scheduler
           -> executor -> models -> parallel
           -> sampling -> structured_output

A replica is one scheduler and one process a rank. Owns a request from its arrival on the socket to its last token.
Knows nothing of HTTP or of other replicas. Read `engine/engine.py` first, then `scheduler/scheduler.py`.
"""
