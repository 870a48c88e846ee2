"""Reasons why a grammar cannot be had."""

ANY = "combinations"


class GrammarError(ValueError):
    """The grammar, not the server, is at fault. The message is for the client that sent it.

    `of_text`: of the two parts of an answer's grammar, calls and text, the text's is at fault.
    """

    def __init__(self, message: str, *, of_text: bool = False) -> None:
        super().__init__(message)
        self.of_text = of_text


class KeywordError(GrammarError):
    """No grammar enforces a keyword of a JSON schema.

    `keyword`: the keyword; `ANY` where a part of the schema takes too much as a whole.
    `at`: the place of the part that has it, as a JSON pointer, or of one that got it from elsewhere. Empty if unknown.
    """

    def __init__(self, message: str, keyword: str, at: str) -> None:
        super().__init__(message)
        self.keyword, self.at = keyword, at


class CompilerUnavailable(RuntimeError):
    """The machine, not the grammar, is at fault. The same grammar may compile later, or on another machine."""
