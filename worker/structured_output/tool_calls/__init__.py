"""Grammars of answers that call tools, or whose parts between marks have forms of their own.

Owns the order of thinking, text and calls, and the ways to write arguments: as JSON, between tags, with strings between
marks. The texts around calls are those of `worker.formats`. Knows nothing of engines. Read `tool_calls.py` first, then
`markers.py`.
"""
