"""The live page at `/`: what the replicas do, and a chat box.

Owns the page, which is one HTML file with its style and script, and the JSON at `/state` that it reads every second.
Counts nothing itself: the figures are those of `router.metrics` and of the replicas' loads, as in `/metrics` and
`shoal status`. Read `state.py` first, then `page.html`.
"""
