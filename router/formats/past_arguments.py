"""The arguments of past calls, as clients send them back: an object for chat templates, whatever the model had written.

A model writes wrong JSON now and then, and an answer that is cut off has half of it. The client keeps that, and sends
it with every later request, so a refusal would end the conversation.
"""

import json
import re
from typing import Any

from router.formats.typed_values import is_text, literal, mended

# The key of arguments that are no object, whatever is tried.
INVALID = "INVALID_JSON"

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+("?)|[{}\[\],]', re.DOTALL)
_CLOSES = {"{": "}", "[": "]"}


def past_arguments(raw: str) -> tuple[dict[str, Any], bool]:
    """The arguments as an object, and whether they were one: none at all and null are an empty one, an object in a
    string is unwrapped. Raises RecursionError for arguments that are nested too deeply."""
    text = raw.strip()
    try:
        read = json.loads(text or "{}", strict=False)
    except ValueError:
        return _mended(text), False
    if isinstance(read, dict):
        return _sendable(read, raw)
    if isinstance(read, str):
        inner, is_whole = past_arguments(read)
        return (inner, is_whole) if INVALID not in inner else ({INVALID: read}, False)
    return ({}, True) if read is None else ({INVALID: text}, False)


def _sendable(read: dict[str, Any], raw: str) -> tuple[dict[str, Any], bool]:
    """The object, unless it has half of a character, which no tokenizer takes."""
    if "\\u" not in raw or is_text(json.dumps(read, ensure_ascii=False)):
        return read, True
    return _whole(read), False


def _whole(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {_whole(key): _whole(inside) for key, inside in value.items()}
        case list():
            return [_whole(inside) for inside in value]
    return value


def _mended(text: str) -> dict[str, Any]:
    for each in (text, *_completed(text)):
        for read in (mended, literal):
            if (found := read(each)) is not None and found.startswith("{"):
                return _sendable(json.loads(found), found)[0]
    return {INVALID: text}


def _completed(text: str) -> list[str]:
    """Objects that a text which breaks off may begin: with all of it, and with the members that are whole."""
    if not text.startswith("{"):
        return []
    brackets: list[str] = []
    is_open, whole = False, ""
    for match in _TOKENS.finditer(text):
        token = match[0]
        is_open = token.startswith('"') and not match[1]
        if token in _CLOSES:
            brackets.append(_CLOSES[token])
        elif token in ("}", "]"):
            if not brackets or brackets.pop() != token:
                return []
        elif token == "," and len(brackets) == 1:
            whole = text[: match.start()] + "}"
    closed = text.rstrip("\\") + '"' if is_open else text.rstrip(" \t\r\n,")
    return [closed + "".join(reversed(brackets)), *filter(None, [whole])]
