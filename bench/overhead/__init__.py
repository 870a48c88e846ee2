"""The cost of a router: CPU time for a token and latencies, in front of replicas that compute nothing.

Owns: the commands `shoal bench overhead` (`command.py`) and `shoal bench traces` (`traces.py`), and the processes that
they start: a router (`router_process.py`), the replicas (`paced_replicas.py`), a receiver of traces
(`span_receiver.py`). Read `command.py` first.
"""
