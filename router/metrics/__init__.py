"""Figures of this router's requests for operators: Prometheus metrics, latencies by replica, lines of the log, traces.

Owns the counting, the names of metrics and spans, and their forms. Decides nothing. Read `metrics.py` first.
"""
