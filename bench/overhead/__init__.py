"""The cost of a router, measured in front of replicas that compute nothing: CPU time for a token, and latencies.

Owns: the command `shoal bench overhead` (`command.py`), and the processes that it starts: a router
(`router_process.py`) and the replicas (`paced_replicas.py`). Read `command.py` first.
"""
