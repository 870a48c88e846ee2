"""Grammars of an answer's text as rules: what clients ask for by a schema, a regular expression or choices."""

import json

from worker.structured_output.conversion.schema import any_object_rules, schema_rules
from worker.structured_output.error import GrammarError
from worker.structured_output.rules import regex
from worker.structured_output.rules.charset import SCALARS, complement, intersection
from worker.structured_output.rules.ebnf import EMPTY, START, Node, Regex, Terminal, alt
from worker.structured_output.tokens import APART

_WITHOUT_APART = intersection(SCALARS, complement(((ord(APART), ord(APART)),)))


def text_rules(kind: str, text: str) -> dict[str, Node]:
    """The rules of a `messages.Grammar` of the kind json_schema, json_object, regex or choice, from `START` on. None of
    their texts has the character `APART`, unless a choice has. Raises GrammarError."""
    match kind:
        case "json_schema":
            return schema_rules(text)
        case "json_object":
            return any_object_rules()
        case "regex":
            pattern = regex.of_characters(text, _WITHOUT_APART)
            if pattern is None:
                raise GrammarError("no text matches the regular expression")
            return {START: Regex(pattern) if pattern else EMPTY}
        case "choice":
            return {START: _choice(text)}
    raise GrammarError(f"a text cannot be given its form by {kind}")


def _choice(text: str) -> Node:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"choice is not valid JSON: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise GrammarError("choice must be a list of one or more strings")
    try:
        json.dumps(choices, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise GrammarError("a choice has half a surrogate pair in it, which is no character") from None
    return alt(map(Terminal, choices))
