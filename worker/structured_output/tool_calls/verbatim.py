"""Strings that a call writes as they are, without escapes, between marks that do not occur in them."""

from worker.structured_output.conversion import values
from worker.structured_output.conversion.formats import FORMATS
from worker.structured_output.conversion.unmarked import TEXT, unmarked, without_bracket
from worker.structured_output.error import GrammarError
from worker.structured_output.json_schema.conjunction import Schema
from worker.structured_output.matching.intersections import intersection as all_of
from worker.structured_output.rules import regex
from worker.structured_output.rules.charset import Ranges, complement, intersection, pattern
from worker.structured_output.rules.ebnf import NEVER, Complement, Node, Regex, Terminal, alt

_LIMITS = ("not", "format", "pattern", "minLength", "maxLength")


def limits(schema: Schema) -> list[str]:
    """The keywords of a schema that limit its strings."""
    return [key for key in _LIMITS if key in schema and (key != "format" or schema[key] in FORMATS)]


def is_writable(text: str) -> bool:
    """Whether all characters can stand in such a string."""
    return all(any(first <= ord(char) <= last for first, last in TEXT) for char in text)


def string(
    schema: Schema, at: str, text: Node, marks: tuple[str, ...], *, trims: bool = False, begin: str | None = None
) -> Node:
    """A string by its schema. `text`: one without limits. With limits, none of `marks` occurs in it, it neither begins
    nor ends with a line's end if a reader `trims` that, and it matches `begin`. Raises GrammarError."""
    keywords = limits(schema)
    if not keywords:
        return text
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    most = None if most is None else int(most)
    form, expression = FORMATS.get(schema.get("format", "")), schema.get("pattern")

    def inside(characters: Ranges) -> list[Node]:
        return values.inside(form, expression, least, most, at, regex.spell_plain(characters))

    parts = inside(TEXT) or [Regex(f"{pattern(TEXT)}*")]
    if parts != inside(without_bracket(TEXT)):
        parts.append(Regex(unmarked(marks, TEXT, telling=None)))
    line_end: Ranges = ((0x0A, 0x0A),)
    others = intersection(TEXT, complement(line_end))
    if trims and parts[: len(inside(others))] != inside(others):
        parts.append(Regex(f"(?:{pattern(others)}(?:{pattern(TEXT)}*{pattern(others)}){{0,1}}){{0,1}}"))
    if begin is not None:
        parts.append(Regex(begin))
    if "not" in schema:
        parts.append(Complement(alt(map(Terminal, schema["not"]["enum"]))))
    found = all_of(parts, f"{', '.join(keywords)} at {at}")
    if found == NEVER:
        raise GrammarError(f"{', '.join(keywords)} at {at}: no text that can be written as it is satisfies all of it")
    return found
