"""The connections of a router over ZeroMQ: to the replicas, and to the other routers.

Owns when a replica counts as lost, the streams of outputs that it sends, and the bookings that routers tell each other.
Knows nothing of HTTP and of text. Read `replicas.py` first, then `connection.py`.
"""
