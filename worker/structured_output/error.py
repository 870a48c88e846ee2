"""Reasons why a grammar cannot be had."""


class GrammarError(ValueError):
    """The grammar, not the server, is at fault. The message is for the client that sent it."""


class CompilerUnavailable(RuntimeError):
    """The machine, not the grammar, is at fault. The same grammar may compile later, or on another machine."""
