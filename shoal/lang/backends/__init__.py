"""Backends of programs: a Shoal server, Shoal in this process, or another endpoint.

Owns: one module for each kind of endpoint. Knows nothing of programs' states but what a `Call` says. Read
`shoal_server.py` first; the interface is `shoal/lang/backend.py`.
"""
