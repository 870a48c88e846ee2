"""Strings that a call writes as they are, without escapes, between marks that do not occur in them."""

from worker.structured_output import regex
from worker.structured_output.charset import Ranges, pattern
from worker.structured_output.conjunction import Schema
from worker.structured_output.ebnf import NEVER, Node, Regex, Repeat, Terminal, seq
from worker.structured_output.error import GrammarError
from worker.structured_output.formats import FORMATS
from worker.structured_output.unmarked import TEXT

_LIMITS = ("not", "format", "pattern", "minLength", "maxLength")


def limits(schema: Schema) -> list[str]:
    """The keywords of a schema that limit its strings."""
    return [key for key in _LIMITS if key in schema and (key != "format" or schema[key] in FORMATS)]


def is_writable(text: str) -> bool:
    """Whether all characters can stand in such a string."""
    return all(any(first <= ord(char) <= last for first, last in TEXT) for char in text)


def string(schema: Schema, at: str, characters: Ranges, text: Node) -> Node:
    """A string by its schema. `text`: one without limits; with any of these, it has only `characters`. Raises
    GrammarError."""
    found = limits(schema)
    if not found:
        return text
    if "not" in found:
        raise GrammarError(f"not at {at} is not supported for strings that are written as they are")
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    most = None if most is None else int(most)
    expression = schema.get("pattern", FORMATS.get(schema.get("format", "")))
    if expression is None:
        return _of_length(least, most, characters, text)
    if "pattern" in found and "format" in found:
        raise GrammarError(f"pattern and format at {at} are not supported together")
    try:
        written = regex.of_characters(expression, least, most, characters)
    except GrammarError as error:
        raise GrammarError(f"pattern at {at}: {error}") from None
    if written is None:
        raise GrammarError(f"pattern at {at}: it needs characters that cannot be written as they are")
    return Regex(written) if written else Terminal("")


def _of_length(least: int, most: int | None, characters: Ranges, text: Node) -> Node:
    one = Regex(pattern(characters))
    if most is not None:
        return Repeat(one, least, most) if least <= most else NEVER
    return seq(Repeat(one, least, least), text) if least else text
