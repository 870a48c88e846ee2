"""Figures of this router's requests for operators: Prometheus metrics, latencies by replica, and lines of the log.

Owns the counting, the names of metrics, and their forms. Decides nothing. Read `metrics.py` first.
"""
