"""Python functions as tools of a chat: `module:function` is described by its signature and docstring, and called."""

import asyncio
import enum
import importlib
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from shoal.client import StreamedCall

DENIED = "error: the user does not allow this call"
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # as OpenAI's protocol has it
SPHINX = re.compile(r"^:param (?:[^:\n]* )?(\w+): *(.+(?:\n[ \t]+\S.*)*)", re.MULTILINE)
GOOGLE = re.compile(r"^(?:Args|Arguments|Parameters):\n((?:[ \t]+.*\n?)+)", re.MULTILINE)
TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    set: "array",
    dict: "object",
    types.NoneType: "null",
    None: "null",
}


class ToolError(Exception):
    """A `--tool` that cannot be used. The message is for the user as it stands."""


@dataclass(frozen=True)
class PythonTool:
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]

    def run(self, arguments: dict[str, Any]) -> str:
        """The function's result as text: a string as it stands, anything else as JSON; what is raised as an error."""
        try:
            left = dict(arguments)
            first = []
            for name, parameter in _signature(self.function).parameters.items():
                if name in left:
                    left[name] = _converted(parameter.annotation, left[name])
                    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                        first.append(left.pop(name))
            result = self.function(*first, **left)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except (Exception, SystemExit) as error:
            return f"error: {type(error).__name__}: {error}"


class Toolbox:
    """The tools of a chat, and the names of those that run without asking."""

    def __init__(self, tools: Iterable[PythonTool] = (), allow_all: bool = False) -> None:
        """Raises ToolError if two tools have one name."""
        self.tools: dict[str, PythonTool] = {}
        for tool in tools:
            if tool.name in self.tools:
                raise ToolError(f"two tools are called {tool.name}")
            self.tools[tool.name] = tool
        self.allowed = set(self.tools) if allow_all else set()

    def described(self) -> list[dict[str, Any]]:
        """The tools as a request has them."""
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in self.tools.values()
        ]

    def answer(self, call: StreamedCall, permits: Callable[[StreamedCall], bool]) -> str:
        """Runs a call; returns what the model reads: the result, or an error. `permits` is asked about a call that
        could run, unless its tool is allowed."""
        if call.name not in self.tools:
            there = ", ".join(self.tools) or "none"
            return f"error: there is no tool {call.name!r}; there are: {there}"
        arguments = parsed(call)
        if arguments is None:
            return f"error: the arguments are not a JSON object: {call.arguments}"
        if call.name not in self.allowed and not permits(call):
            return DENIED
        return self.tools[call.name].run(arguments)


def load(where: str) -> PythonTool:
    """The tool at `module:function`. Raises ToolError."""
    module_name, colon, name = where.partition(":")
    if not module_name or not colon or not name:
        raise ToolError(f"--tool {where}: say module:function, as in --tool math:sqrt")
    try:
        with redirect_stdout(sys.stderr):
            found: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ToolError(f"--tool {where}: there is no module {module_name}, here or installed") from None
        raise ToolError(f"--tool {where}: importing {module_name} fails: {type(error).__name__}: {error}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ToolError(f"--tool {where}: {module_name} has no function {name}")
        found = getattr(found, part)
    if not callable(found):
        raise ToolError(f"--tool {where}: {name} is not a function")
    return described(found, name.rpartition(".")[2])


def described(function: Callable[..., Any], name: str) -> PythonTool:
    """A tool with the description and the parameters that the function's docstring and signature tell. Raises ToolError
    if it has no signature."""
    if not NAME.fullmatch(name):
        raise ToolError(f"{name} cannot be the name of a tool: letters, digits and _, 64 at most")
    try:
        signature = _signature(function)
    except (ValueError, TypeError):
        raise ToolError(f"{name} does not say what its parameters are") from None
    text = inspect.getdoc(function) or ""
    said = _said_of_parameters(text)
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            schema["additionalProperties"] = True
            continue
        one = schema_of(parameter.annotation)
        if parameter.name in said:
            one.setdefault("description", said[parameter.name])
        default = parameter.default.value if isinstance(parameter.default, enum.Enum) else parameter.default
        if default is inspect.Parameter.empty:
            required.append(parameter.name)
        elif isinstance(default, str | int | float):
            one["default"] = default
        schema["properties"][parameter.name] = one
    if required:
        schema["required"] = required
    first = " ".join(re.split(r"\n\s*\n", text, maxsplit=1)[0].split())
    return PythonTool(name, "" if re.match(r"Args:|:param\b", first) else first, schema, function)


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a parameter's type; empty, which is any value, for a type without one."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        texts = [text for text in inside[1:] if isinstance(text, str)]
        return schema_of(inside[0]) | ({"description": texts[0]} if texts else {})
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(one) for one in inside]}
    if origin is Literal:
        return _choice(inside)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _choice([member.value for member in kind])
    base = origin or kind
    if not isinstance(base, type | None) or base not in TYPES:
        return {}
    schema: dict[str, Any] = {"type": TYPES[base]}
    if base in (list, set) or (base is tuple and len(inside) == 2 and inside[1] is Ellipsis):
        if inside and (items := schema_of(inside[0])):
            schema["items"] = items
    elif base is dict and inside and (values := schema_of(inside[1])):
        schema["additionalProperties"] = values
    return schema


def parsed(call: StreamedCall) -> dict[str, Any] | None:
    """The arguments of a call; None if they are not a JSON object."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def shown(name: str, arguments: str) -> str:
    """A call as Python writes it: `name(a=1, b="x")`. Nothing in it moves the cursor or hides a part of it."""
    values = parsed(StreamedCall("", name, arguments))
    if values is None:
        return printable(f"{name}({arguments})").replace("\n", "\\n")
    inside = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
    return printable(f"{name}({inside})").replace("\n", "\\n")


def printable(text: str) -> str:
    """`text` with what a terminal would obey, and what it would not show, written as escapes; lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature. Types that are written as text are evaluated, where they can be."""
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, SyntaxError, AttributeError, TypeError):
        return inspect.signature(function)


def _choice(values: Iterable[Any]) -> dict[str, Any]:
    listed = list(values)
    kinds = {TYPES.get(type(value)) for value in listed}
    kind = kinds.pop() if len(kinds) == 1 else None
    return ({"type": kind} if kind else {}) | {"enum": listed}


def _converted(kind: Any, value: Any) -> Any:
    """A value from JSON as the parameter's type has it: a member of an Enum, a tuple, a set. Others stay."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _converted(inside[0], value)
    if origin in (Union, types.UnionType):
        enums = [one for one in inside if isinstance(one, type) and issubclass(one, enum.Enum)]
        return next((one(value) for one in enums if value in [member.value for member in one]), value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    base = origin or kind
    if base in (list, set, tuple) and isinstance(value, list):
        return base([_converted(inside[0], one) for one in value] if inside and base is not tuple else value)
    return value


def _said_of_parameters(text: str) -> Mapping[str, str]:
    """The descriptions of parameters in a docstring of Google's or Sphinx's form."""
    found = {name: " ".join(said.split()) for name, said in SPHINX.findall(text)}
    google = GOOGLE.search(text)
    if not google:
        return found
    last = ""
    for line in inspect.cleandoc("\n" + google[1]).splitlines():
        if entry := re.match(r"\*{0,2}(\w+)(?: ?\([^)]*\))?: *(.*)", line):
            last = entry[1]
            found[last] = entry[2]
        elif last:
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found
