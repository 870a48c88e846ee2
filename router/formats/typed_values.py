"""Values that a model wrote as plain text, made JSON by the schema of the tool's parameter."""

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_NAMES = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "int": "integer", "float": "number", "double": "number", "bool": "boolean",
    "dict": "object", "map": "object", "list": "array", "tuple": "array",
}  # fmt: skip
# A number, perhaps with a plus or with zeros before it, which JSON does not have.
_NUMBER = re.compile(r"([-+]?)0*([0-9]+)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WRONG_ESCAPE = re.compile(r"""\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|'|)""")
# Strings of Python, and in them what may not stand there as it is.
_PYTHON_STRING = re.compile(r"""('{3}|"{3}|'|")((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)
_CONTROL = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
_WRAPPERS = frozenset({"arguments", "input"})
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 16  # references and unions further down are not followed


def value_types(
    parameters: Mapping[str, Any], key: str, otherwise: frozenset[str] = frozenset({"string"})
) -> frozenset[str]:
    """The JSON types that a schema of an object allows for one property. `otherwise`: without any word on it."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, parameters, _MAX_DEPTH)) or otherwise


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or not depth:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {_NAMES.get(declared.lower(), declared.lower())}
    if isinstance(declared, list):
        return {_NAMES.get(str(name).lower(), str(name).lower()) for name in declared}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolved(reference, root), root, depth - 1)
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(union), list):
            return set().union(*(_types(part, root, depth - 1) for part in parts))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema[k] for k in ("const",) if k in schema]
    if values:
        return {_type_of(value) for value in values}
    return {"object"} if "properties" in schema else {"array"} if "items" in schema else set()


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema at a JSON pointer (RFC 6901) into `root`; None if there is none."""
    found: Any = root
    if reference != "#" and not reference.startswith("#/"):
        return None
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value as text. Valid JSON stays as written. What fits no type becomes a string."""
    value = text.strip()
    if (value == "null" and "null" in types) or (value.lower() in ("null", "none") and "string" not in types):
        return "null"
    number = _NUMBER.fullmatch(value) if types & {"integer", "number"} else None
    if number is not None and ("number" in types or not (number[3] or number[4])) and math.isfinite(float(value)):
        found = ("-" if number[1] == "-" else "") + value[number.start(2) :]
        if found == value or "string" not in types:  # otherwise, as a zip code
            return found
    if "boolean" in types and value.lower() in ("true", "false"):
        return value.lower()
    if not types.issubset({"string", "integer", "number", "boolean", "null"}):
        nested = _nested(value)
        if nested is not None:
            return nested
    return json.dumps(text, ensure_ascii=False)


def plain(text: str) -> str | None:
    """`text` without white space around it, if it is valid JSON; otherwise None."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text.strip()


def mended(text: str) -> str | None:
    """The JSON of an object or a list that is JSON but for control characters in its strings, and for backslashes that
    begin no escape; otherwise None."""
    for each in (text, _WRONG_ESCAPE.sub(_escaped, text)):
        try:
            found = json.loads(each, strict=False, parse_constant=_refuse)
            return _written(found) if isinstance(found, dict | list) else None
        except (ValueError, RecursionError):
            continue
    return None


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[1] else "'" if match[0] == "\\'" else f"\\{match[0]}"


def _nested(value: str) -> str | None:
    for read in (plain, mended, literal):  # some models write Python's
        if (found := read(value)) is not None:
            return found
    return None


def literal(value: str) -> str | None:
    """The JSON of a Python literal, sets as lists; None if it is none, or none that JSON has. Its strings may have
    control characters, or an `f` where nothing is to be put in, and `true`, `false` and `null` count too."""
    try:
        tree = ast.parse(_PYTHON_STRING.sub(_without_controls, value).lstrip(" \t"), mode="eval")
        return _written(ast.literal_eval(_AsPython().visit(tree)))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class _AsPython(ast.NodeTransformer):
    """Makes what models mean by a literal one that `ast.literal_eval` takes."""

    def visit_Set(self, node: ast.Set) -> ast.AST:
        return ast.List([self.visit(each) for each in node.elts], ast.Load())

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        texts = [str(each.value) for each in node.values if isinstance(each, ast.Constant)]
        return ast.Constant("".join(texts)) if len(texts) == len(node.values) else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _without_controls(string: re.Match[str]) -> str:
    def spelled(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith("\\") else f"\\x{ord(match[0]):02x}"

    return f"{string[1]}{_CONTROL.sub(spelled, string[2])}{string[1]}"


def _written(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_text(text) else json.dumps(value)


def wrappers(parameters: Mapping[str, Any] | None) -> frozenset[str]:
    """The names under which models put all arguments of a tool, and which its parameters do not have; none for a tool
    that is not known."""
    return frozenset() if parameters is None else _WRAPPERS - _properties(parameters)


def unwrapped(value: str, parameters: Mapping[str, Any]) -> str | None:
    """The JSON of the value of a wrapper, if it is an object with arguments of the tool; otherwise None."""
    if not value.startswith("{") or (read := mended(value)) is None:
        return None
    keys = json.loads(read).keys()
    return value if not keys or keys & _properties(parameters) else None


def _properties(parameters: Mapping[str, Any]) -> frozenset[str]:
    declared = parameters.get("properties")
    return frozenset(declared) if isinstance(declared, Mapping) else frozenset()


def is_text(text: str) -> bool:
    """Whether a string can be sent: half of a surrogate pair, which an escape may stand for, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def as_object(raw: str) -> str:
    """Arguments as the model wrote them, made an object where that is clear: none at all or null is an empty one, and
    one inside a JSON string is unwrapped."""
    if raw in ("null", ""):
        return "{}"
    if raw.startswith('"'):
        try:
            inner = json.loads(raw, strict=False)
        except ValueError:
            return raw
        if not inner.strip():
            return "{}"
        if inner.lstrip().startswith("{") and is_text(inner):
            return (plain(inner) or mended(inner) or str(inner)).strip()
    return raw
