"""Ways to write JSON values: as JSON, as JSON in which markers do not occur, and as Python's literals."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from worker.structured_output.charset import JSON_PLAIN, Ranges, pattern
from worker.structured_output.ebnf import Terminal
from worker.structured_output.unmarked import may_break, unmarked, without_bracket

_HEX = "[0-9a-fA-F]"
_UNIT = rf"[0-9a-cA-CefEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}"
# Surrogates are written in pairs or not at all.
_JSON_ESCAPE = rf'\\(?:["\\/bfnrt]|u(?:{_UNIT}|[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}))'
_PYTHON_ESCAPE = rf'\\(?:["\\bfnrt]|u(?:{_UNIT}))'


@dataclass(frozen=True)
class Spelling:
    """A way to write JSON values.

    | field | meaning |
    | --- | --- |
    | `plain` | characters that stand for themselves in strings, and in names |
    | `escape` | a pattern of one escape in a string |
    | `string` | a pattern of what may stand in a string that has no schema |
    | `words` | true, false and null |
    | `write` | writes a value |
    """

    plain: Ranges
    escape: str
    string: str
    words: tuple[str, str, str]
    write: Callable[[Any], str]

    def constant(self, value: Any) -> Terminal:
        """Exactly this value, in one spelling."""
        return Terminal(self.write(value))


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair needs an escape
        text = json.dumps(value)
    return text


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(key)}: {_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return repr(value) if value is None or isinstance(value, bool) else _json(value)


def json_without(markers: Iterable[str]) -> Spelling:
    """JSON in whose text none of `markers` occurs. Each begins with `<`, and has no other."""
    marks = tuple(markers)

    def write(value: Any) -> str:
        text = _json(value)
        return text.replace("<", "\\u003c") if may_break(text, marks) else text

    inside = unmarked(marks, JSON_PLAIN, _JSON_ESCAPE)
    return Spelling(without_bracket(JSON_PLAIN), _JSON_ESCAPE, inside, ("true", "false", "null"), write)


def _whole(escape: str, words: tuple[str, str, str], write: Callable[[Any], str]) -> Spelling:
    return Spelling(JSON_PLAIN, escape, f"(?:{pattern(JSON_PLAIN)}|{escape})*", words, write)


JSON = _whole(_JSON_ESCAPE, ("true", "false", "null"), _json)
PYTHON = _whole(_PYTHON_ESCAPE, ("True", "False", "None"), _python)
