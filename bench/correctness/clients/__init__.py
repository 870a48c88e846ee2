"""Clients of other authors against a running server, each in an environment of its own.

Owns: what a server must do for `openai`, `anthropic`, langchain, litellm, instructor, pydantic-ai, llama-index,
outlines, guidellm, lm-eval and a browser to work as their authors document them. One module a client, each with its
`checks`; `shoal bench clients` runs those of one client or of all, and the server's tests those of `openai` and
`anthropic`. Knows nothing of how a server works. Read `checks.py` first.
"""
