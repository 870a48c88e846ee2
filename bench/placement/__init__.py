"""Placement of requests on replicas: the policies of the router, compared on the same requests.

Read `router.py` first. `conversations.py` samples a trace's conversations, or makes conversations up.
"""
