"""The cost of a router: CPU time for a token and latencies, in front of replicas that compute nothing.

Owns: the command `shoal bench overhead` (`command.py`), and the processes that it starts: a router
(`router_process.py`) and the replicas (`paced_replicas.py`). Read `command.py` first.
"""
