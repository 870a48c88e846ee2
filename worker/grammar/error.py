"""What a client is told about a grammar that cannot be used."""


class GrammarError(ValueError):
    """The grammar, not the server, is at fault; the message is for whoever sent it."""
