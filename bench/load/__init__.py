"""A load on a server, over HTTP: the requests, their times, and the measurements.

Owns workloads and traces, the client, the metrics of requests, and the report. Read `serve.py` first.
"""
