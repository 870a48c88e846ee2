"""Shoal's public face: the `shoal` command and what it needs to talk to a running server.

Owns: the command line (`shoal serve | chat | pull | status | bench`). Knows nothing of how a request is scheduled: it
configures the cluster (`cluster`) and speaks HTTP to it. Read `shoal/cli.py` first.
"""

__version__ = "0.1.0"
