"""Arguments of calls as an object with bare keys, in which strings stand between marks of their own."""

import re
from typing import Any

from worker.structured_output.conversion import values
from worker.structured_output.conversion.schema import SchemaConverter
from worker.structured_output.conversion.values import COLON
from worker.structured_output.json_schema.conjunction import Schema
from worker.structured_output.rules.ebnf import EMPTY, NEVER, FreeText, Node, Ref, Regex, Terminal, seq
from worker.structured_output.tokens import APART
from worker.structured_output.tool_calls import verbatim
from worker.structured_output.tool_calls.call_formats import Quotes
from worker.structured_output.tool_calls.markers import Speller

_BARE = re.compile(r"[^\s:,{}\[\]<\"](?:[^:,{}\[\]<\"]*[^\s:,{}\[\]<\"])?")


def quoted_rules(quotes: Quotes, speller: Speller) -> dict[str, Node]:
    """The rules that grammars of such objects refer to, as `values.common_rules` has them for JSON."""
    mark = speller.mark(quotes.mark)
    name = Regex("[a-zA-Z_][a-zA-Z0-9_]*")
    member = seq(Ref("name"), COLON, Ref("any"))
    return values.common_rules() | {
        "space": EMPTY,
        "text": FreeText(excludes=(quotes.mark, APART)),
        "string": seq(mark, Ref("text"), mark),
        "name": name,
        "object": seq(Terminal("{"), values.listed([], member, 0, None), Terminal("}")),
    }


class QuotedConverter(SchemaConverter):
    """Converts one schema to nodes of such values. `rules` has those of `quoted_rules`."""

    def __init__(self, root: Any, quotes: Quotes, speller: Speller, rules: dict[str, Node], prefix: str) -> None:
        super().__init__(root, rules=rules, prefix=prefix)
        self._quotes, self._mark = quotes, speller.mark(quotes.mark)

    def constant(self, value: Any) -> Node:
        match value:
            case str():
                is_written = verbatim.is_writable(value) and self._quotes.mark not in value
                return self._between(Terminal(value)) if is_written else NEVER
            case dict():
                members = [seq(self._name(name), Terminal(":"), self.constant(each)) for name, each in value.items()]
                return self._all(("{", "}"), members)
            case list():
                return self._all(("[", "]"), [self.constant(each) for each in value])
        return super().constant(value)

    def _all(self, brackets: tuple[str, str], parts: list[Node]) -> Node:
        between = [each for part in parts for each in (Terminal(","), part)]
        return seq(Terminal(brackets[0]), *between[1:], Terminal(brackets[1]))

    def _between(self, text: Node) -> Node:
        return NEVER if text == NEVER else seq(self._mark, text, self._mark)

    def _name(self, name: str) -> Node:
        is_bare = _BARE.fullmatch(name) is not None and verbatim.is_writable(name)
        return Terminal(name) if is_bare else self.constant(name)

    def _any_name(self) -> Node:
        return Ref("name")

    def _string(self, schema: Schema, at: str) -> Node:
        if not verbatim.limits(schema):
            return Ref("string")
        return self._between(verbatim.string(schema, at, Ref("text"), (self._quotes.mark,)))

    def _extra(self, schema: Schema, properties: dict[str, Any], more: Any, at: str) -> Node:
        """No member next to declared ones, and none by patterns: some of their names would be bare, and others not."""
        return NEVER
