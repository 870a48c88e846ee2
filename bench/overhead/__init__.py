"""The cost of a router: CPU time for a token and latencies, in front of replicas that compute nothing, and throughput.

Owns: the command `shoal bench overhead` (`command.py`), and the processes that it starts: a router
(`router_process.py`) and the replicas (`paced_replicas.py`); and `python -m bench.overhead.throughput`, with a real
replica (`replica_process.py`), through a router and without one. Read `command.py` first.
"""
