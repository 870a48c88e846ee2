"""The replicas as this router knows them, and the choice of one for a request.

Owns placement, which is a pure function, the bookings, the prediction of waits, and the demand from which autoscaling
decides. Knows nothing of sockets and of HTTP. Read `placement.py` first, then `fleet.py`.
"""
