"""The input of a call of a custom tool: free text, which the model writes as the only member of a JSON object.

{"input": "*** Begin Patch\\n..."}   →   *** Begin Patch
                                        ...
"""

import json
import re
from collections.abc import Mapping
from typing import Any

MEMBER = "input"
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {MEMBER: {"type": "string"}},
    "required": [MEMBER],
    "additionalProperties": False,
}

_OPENING = re.compile(rf'\s*\{{\s*"{MEMBER}"\s*:\s*"')
_HEX = "[0-9a-fA-F]"
# What can be read without what follows: half of a character waits for the other half.
_WHOLE = re.compile(
    rf'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}|\\u(?![dD][89abAB]){_HEX}{{4}})*'
)
_REST = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
# An escape: one that the end breaks off, a right one, or none.
_ESCAPE = re.compile(
    rf'\\(?:(u{_HEX}{{0,3}}\Z|u[dD][89abAB]{_HEX}{{2}}(?:\\u{_HEX}{{0,3}})?\Z)|(["\\/bfnrt]|u{_HEX}{{4}})|)'
)


def as_arguments(text: str) -> str:
    """The arguments that stand for an input."""
    return json.dumps({MEMBER: text}, ensure_ascii=False)


class CustomInput:
    """The input of one call, from its arguments as they come. What `push` and `end` return, joined, depends only on the
    arguments, never on where they are cut. Arguments of another form are the input themselves."""

    def __init__(self) -> None:
        self._raw = ""  # what is not read yet
        self._is_open = False

    def push(self, arguments: str) -> str:
        """More of the input."""
        self._raw += arguments
        if not self._is_open:
            opening = _OPENING.match(self._raw)
            if opening is None:
                return ""
            self._is_open, self._raw = True, self._raw[opening.end() :]
        found = _WHOLE.match(self._raw)
        assert found is not None
        self._raw = self._raw[found.end() :]
        return _read(found[0])

    def end(self) -> str:
        """The rest of the input. No more arguments come."""
        raw, self._raw = self._raw, ""
        if not self._is_open:
            return _other(raw)
        found = _REST.match(raw)
        assert found is not None
        return _read(_ESCAPE.sub(_mended, found[0]))


def _mended(escape: re.Match[str]) -> str:
    return "" if escape[1] else escape[0] if escape[2] else "\\\\"


def _read(written: str) -> str:
    """The text between the quotes of a JSON string."""
    text: str = json.loads(f'"{written}"', strict=False) if "\\" in written else written
    return text.encode(errors="replace").decode()


def _other(arguments: str) -> str:
    """The input in arguments that are no object which begins with it."""
    try:
        read = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(read, dict):
        inside = read.get(MEMBER, next(iter(read.values())) if len(read) == 1 else None)
        read = inside if inside is not None or read else ""
    return read.encode(errors="replace").decode() if isinstance(read, str) else arguments
