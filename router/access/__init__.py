"""Access of clients: API keys, limits, and shares of what clients use together.

Owns the key file, the check of a key, and the counts that routers exchange. Knows nothing of what is asked. Read
`auth.py` first, then `rate_limits.py`.
"""
