"""Reasons why a grammar cannot be had."""


class GrammarError(ValueError):
    """The grammar, not the server, is at fault. The message is for the client that sent it.

    `of_text`: of the two parts of an answer's grammar, calls and text, the text's is at fault.
    """

    def __init__(self, message: str, *, of_text: bool = False) -> None:
        super().__init__(message)
        self.of_text = of_text


class CompilerUnavailable(RuntimeError):
    """The machine, not the grammar, is at fault. The same grammar may compile later, or on another machine."""
