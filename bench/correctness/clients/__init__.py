"""Clients of other authors against a running server, each in an environment of its own.

Owns: what a server must do for packages (`openai`, langchain, ...), frameworks (openai-agents, LangGraph, ...), agents
in the terminal (Codex, Claude Code, ...) and a browser to work as their authors document them. One module a client,
each with its `checks`; `shoal bench clients` runs those of one client or of all, and the server's tests those of
`openai` and `anthropic`. Agents are driven by `director.py`, with the model of `made_model.py` where there is no GPU.
Knows nothing of how a server works. Read `checks.py` first.
"""
