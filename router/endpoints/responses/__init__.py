"""OpenAI's Responses, with those that are stored and those that run in the background.

Owns the reader of requests, the writer of answers and of events, the store, the runs, and the routes. The types of the
bodies are in `router.wire.responses_types` and `router.wire.responses_objects`. Read `reader.py` first, then
`writer.py`.
"""
