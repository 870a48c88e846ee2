"""A bystander at a server that others attack: how much longer it waits than alongside one well-behaved client.

Owns: a client that asks at a pace (`paced_client.py`), connections from an address of their own (`connections.py`), the
attacks (`attacks.py`), the process that makes them (`attacker.py`), and the command `shoal bench door`. Read
`command.py` first.
"""
