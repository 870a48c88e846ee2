"""How the answer to one conversation is read: by which format, from which state, and what may be in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.chat.conversation import Tool
from router.chat.deltas import CallBegin
from router.formats.format import OutputFormat
from router.formats.lexer import Lexer


@dataclass(frozen=True)
class AnswerSyntax:
    """The rules by which the answers of a request are read.

    | field | meaning |
    | --- | --- |
    | `format` | the model's |
    | `tools` | the tools that may be called; none: the text of calls is text |
    | `thinks` | whether the prompt ends inside the model's thinking |
    | `may_open_thinking` | whether the model may begin to think by itself, before anything else |
    | `parallel` | whether an answer may have more than one call |
    | `end_of_thinking` | tokens that end thinking, where its budget is spent |
    | `calls_before` | number of calls in the conversation |
    """

    format: OutputFormat
    tools: Sequence[Tool]
    thinks: bool
    may_open_thinking: bool
    parallel: bool
    end_of_thinking: list[int]
    calls_before: int = 0

    @property
    def may_think(self) -> bool:
        """Whether the model has a way to think before it answers."""
        return self.format.may_think

    @property
    def marker_ids(self) -> frozenset[int]:
        """Tokens that are markers of the format."""
        return self.format.marker_ids

    def lexer(self) -> Lexer:
        """A lexer for one sequence."""
        return Lexer(self.format, self.tools, thinks=self.thinks, calls=bool(self.tools))

    def with_id(self, begin: CallBegin) -> CallBegin:
        """The beginning of a call, with an id as the model's family has them if the model gave none."""
        if begin.id is not None:
            return begin
        return CallBegin(begin.index, begin.name, self.format.new_call_id(begin.name, self.calls_before + begin.index))
