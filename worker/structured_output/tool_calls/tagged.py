"""Arguments of calls that stand between tags, one by one: strings as they are, other values as JSON.

Readers make such text JSON again by the tool's schema. A string next to other types is read as one of those if it looks
like one, so such strings are kept apart. Between tags, no value contains what would end it.
"""

import ast
import json
import re
from typing import Any

from worker.structured_output.conversion.schema import SchemaConverter
from worker.structured_output.conversion.unmarked import TEXT, may_break
from worker.structured_output.error import GrammarError
from worker.structured_output.json_schema.conjunction import Schema
from worker.structured_output.json_schema.keywords import generated_types
from worker.structured_output.rules.charset import category, complement, intersection, pattern, union
from worker.structured_output.rules.ebnf import NEVER, Node, Ref, Regex, Repeat, Terminal, alt, optional, seq
from worker.structured_output.tool_calls import verbatim
from worker.structured_output.tool_calls.call_formats import Tags
from worker.structured_output.tool_calls.markers import Speller

_NAME = re.compile(r"[^\s<>\"'=](?:[^<>\"'=\n]*[^\s<>\"'=])?")
_ANY_NAME = Regex("[a-zA-Z_][a-zA-Z0-9_]*")
_WORDS = frozenset(("true", "false", "null", "none"))
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class TaggedArguments:
    """Grammars of the arguments of one tool."""

    def __init__(self, tags: Tags, speller: Speller, converter: SchemaConverter) -> None:
        """`converter` is that of the tool's schema, and spells JSON without what `tags` end with. Its rule `text` is
        that of text without that."""
        self._tags, self._speller, self._converter = tags, speller, converter
        self._text = Ref("text")

    def any(self) -> Node:
        """Any arguments."""
        return Repeat(self._argument(_ANY_NAME, [("string", self._text)]), 0, None)

    def of(self, schema: Schema, at: str) -> Node:
        """The arguments of a schema without `$ref` and combinations, in its order."""
        if "enum" in schema or "const" in schema:
            raise GrammarError(f"enum and const at {at} are not supported for arguments between tags")
        properties, needed, more = self._converter.properties(schema, at)
        if properties:
            arguments = [(self.argument(name, sub, at), name in needed) for name, sub in properties.items()]
            return seq(*(argument if is_needed else optional(argument) for argument, is_needed in arguments))
        for key in ("patternProperties", "propertyNames", "minProperties", "maxProperties"):
            if key in schema:
                raise GrammarError(f"{key} at {at} is not supported for arguments between tags")
        value = self._values(True if more is None else more, f"{at}/additionalProperties")
        return Repeat(self._argument(_ANY_NAME, value), 0, None)

    def argument(self, name: str, schema: Any, at: str) -> Node:
        """An argument."""
        if _NAME.fullmatch(name) is None:
            raise GrammarError(f"properties at {at}: the name {name!r} cannot be written in a tag")
        return self._argument(Terminal(name), self._values(schema, f"{at}/properties/{name}"))

    def _argument(self, name: Node, values: list[tuple[str, Node]]) -> Node:
        tags, spell = self._tags, self._speller.node
        starts = {"string": tags.string, "other": tags.other}
        # Text is one regular part with what ends it.
        value = alt(seq(spell(*starts[kind]), seq(node, spell(*tags.after))) for kind, node in values)
        return seq(spell(tags.before), name, spell(*tags.between), value)

    def _values(self, schema: Any, at: str) -> list[tuple[str, Node]]:
        """All forms of a value: whether it is a string as it is, or another, and its node."""
        alternatives = self._converter.combinations.simple(schema, at)
        types = {type_ for each in alternatives for type_ in _types(each)}
        found: list[tuple[str, Node]] = []
        for each in alternatives:
            if "enum" in each or "const" in each:
                found += self._listed(each, types, at)
                continue
            for type_ in _types(each):
                if type_ == "string":
                    found.append(("string", self._string(each, types, at)))
                else:
                    found.append(("other", self._converter.value({**each, "type": type_}, at)))
        return found or [("other", NEVER)]

    def _is_told(self, types: set[str]) -> bool:
        """Whether a reader knows a string for one without a look at it."""
        return types == {"string"} or bool(self._tags.string)

    def _listed(self, schema: Schema, types: set[str], at: str) -> list[tuple[str, Node]]:
        values = self._converter.listed(schema)
        found: list[tuple[str, Node]] = []
        for value in values:
            if not isinstance(value, str):
                found.append(("other", self._converter.constant(value)))
            elif self._keeps(value) and (self._is_told(types) or _is_only_text(value)):
                found.append(("string", Terminal(value)))
        if values and not found:
            raise GrammarError(f"enum at {at}: none of the values can be written between tags")
        return found

    def _keeps(self, value: str) -> bool:
        """Whether a reader gets exactly this string."""
        is_trimmed = self._tags.trims and (value.startswith("\n") or value.endswith("\n"))
        return not may_break(value, self._tags.ends) and "\0" not in value and not is_trimmed

    def _string(self, schema: Schema, types: set[str], at: str) -> Node:
        is_apart = self._is_told(types) or types <= {"string", "null"}
        if not is_apart and not verbatim.limits(schema):
            return seq(Regex(_safe_start()), self._text)
        begin = None if is_apart else f"{_safe_start()}{pattern(TEXT)}*"
        return verbatim.string(schema, at, self._text, self._tags.ends, trims=self._tags.trims, begin=begin)


def _types(schema: Schema) -> list[str]:
    """The types of the values of a schema without combinations. Without any word on it, readers take strings."""
    if "enum" in schema or "const" in schema:
        listed = schema["enum"] if "enum" in schema else [schema["const"]]
        return [_TYPES.get(type(value), "null") for value in listed]
    return generated_types(schema) or ["string"]


def _is_only_text(value: str) -> bool:
    """Whether no reader takes the string for a value of another type."""
    if value.strip().lower() in _WORDS:
        return False
    for read in (json.loads, ast.literal_eval):
        try:
            read(value.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return False
    return True


def _safe_start() -> str:
    """Beginnings of texts that are neither JSON nor a literal of Python."""
    letters = "bBrRuUfFnNtT"  # begin words and prefixes of strings
    taken = union([*((ord(c), ord(c)) for c in "\"'([{+-~.#\\<" + letters), (0x30, 0x39), *category("s")[1]])
    other = pattern(intersection(TEXT, complement(taken)))
    return f"(?:{other}|[{letters}][a-z]{{5}})"
