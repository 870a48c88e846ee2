"""HTTP around the routes: connections, bodies of requests, and what happens to every answer.

Owns the listener and TLS, limits of size and time, the memory of bodies, and requests that are passed on to other
endpoints. Knows nothing of models and of tokens. Read `connection.py` first, then `body.py`.
"""
