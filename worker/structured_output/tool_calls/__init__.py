"""Grammars of answers that call tools, or whose parts between marks have forms of their own.

Owns the texts around calls by family of models, and the ways to write arguments: as JSON, between tags, with strings
between marks. Knows nothing of engines. Read `tool_calls.py` first, then `call_formats.py`.
"""
