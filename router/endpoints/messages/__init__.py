"""Anthropic's Messages.

Owns the reader of requests, the writer of answers and of events, and the routes. The types of the bodies are in
`router.wire.messages_types`. Read `reader.py` first, then `writer.py`.
"""
