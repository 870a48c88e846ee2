"""Answers as they leave: as events, in the dialect of the client, until they end or something ends them early.

Owns server-sent events, the form of errors in each protocol, and the early ends: deadlines, `/abort_request`, and a
server that shuts down. Knows nothing of what is in an answer. Read `sse.py` first, then `shutdown.py`.
"""
