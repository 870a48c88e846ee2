"""A fleet of replicas in virtual time: the router's own code and other systems' placement rules, on equal requests.

Owns: loads (`workloads.py`), replicas that cost what a cost model says (`replica.py`), the simulation
(`simulation.py`), this router and others' rules (`shoal_router.py`, `other_rules.py`), and what the command
`shoal bench fleet` measures. Read `simulation.py` first.
"""
