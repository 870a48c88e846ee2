"""The loop of a replica: requests in by ZeroMQ, one step after another, tokens out.

Owns the parts of a step (`steps.py`), the three loops that order them (`loops.py`), the socket (`server.py`), the
predicted time line of the stages, and the learned costs on disk. Read `engine.py` first, then `loops.py`.
"""
