"""Tools with generated schemas, and the judgement of their calls: a number brings the same tool back.

The schemas use what tools of agents use, and more of it: nested objects, arrays and tuples, enums, numbers with limits,
strings with lengths, patterns and formats, optional properties, maps, unions, `allOf`, references, also of a schema to
itself, and names with any characters.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import jsonschema

from bench.schemas import formats

Spelling = Literal["any", "tags", "python"]

WORDS = """
city country date limit query path mode text unit value count items owner price tags title user status address filter
""".split()
ODD_NAMES: dict[Spelling, list[str]] = {
    "any": [
        *("first name", "naïve", "日本", "a/b", "$ref", 'say "hi"', "back\\slash", "tab\there", "line\nend", "", " "),
        *("🦊", "<b>", "</tool_call>", "null", "1", "x-y_z", "ключ", "a=b", "{}", "'", "__proto__", "\u2028", "type"),
    ],
    "tags": ["first name", "naïve", "日本", "a/b", "$ref", "🦊", "x-y_z", "ключ", "1", "null", "{}", "__proto__"],
    "python": ["naïve", "日本", "ключ", "_", "x1", "__proto__", "type"],
}
TOOL_NAMES = ["search", "get_weather", "mcp.files:read", "Write-File", "a", "x" * 64, "name", "7zip", "functions.get"]
PATTERNS = [
    "^[A-Z]{2}[0-9]{4}$",
    "^(?:\\+[1-9])?[0-9]{6,10}$",
    "^[a-z]+(?:-[a-z]+){0,2}$",
    "^\\w{3,8}$",
    "^#[0-9a-f]{6}$",
]
FORMATS = ["date", "time", "date-time", "email", "uuid", "ipv4", "uri", "hostname", "duration", "ipv6"]
CONSTANTS: list[Any] = ["auto", "km/h", 'a "b"', "naïve 🦊", "", "null", "<x>", 0, 1, -3.5, True, None]


@dataclass
class ToolMaker:
    """Makes one tool. `names`: which names of properties a format of calls can write.

    A schema further down than `deepest` has no parts of its own.
    """

    chance: random.Random
    names: Spelling = "any"
    deepest: int = 2
    _defs: dict[str, Any] = field(default_factory=dict)

    def tool(self, name: str) -> dict[str, Any]:
        """A tool as chat completions take it."""
        parameters = self._object(0)
        if self._defs:
            parameters["$defs"] = self._defs
        return {
            "type": "function",
            "function": {"name": name, "description": f"Does {name}.", "parameters": parameters},
        }

    def schema(self, depth: int) -> Any:
        """The schema of any value."""
        simple: list[tuple[int, Callable[[int], Any]]] = [
            *((6, self._string), (3, self._integer), (2, self._number), (2, self._boolean), (3, self._enum)),
            *((1, self._constant), (1, self._types), (1, self._anything)),
        ]
        nested: list[tuple[int, Callable[[int], Any]]] = [
            *((3, self._object), (3, self._array), (1, self._tuple), (1, self._map), (2, self._union)),
            *((1, self._tagged_union), (1, self._all_of), (2, self._reference)),
        ]
        kinds = simple + nested if depth < self.deepest else simple
        (make,) = self.chance.choices([make for _, make in kinds], [weight for weight, _ in kinds])
        made = make(depth)
        if isinstance(made, dict) and self.chance.random() < 0.3:
            made = {"description": "What it is.", **made}
        return made

    # ------------------------------------------------------------ values without parts

    def _string(self, depth: int) -> Any:
        limits = self.chance.random()
        if limits < 0.4:
            return {"type": "string"}
        if limits < 0.7:
            least = self.chance.randint(0, 6)
            lengths = {"minLength": least, "maxLength": least + self.chance.randint(0, 40)}
            kept = self.chance.choice([["minLength"], ["maxLength"], ["minLength", "maxLength"]])
            return {"type": "string", **{key: lengths[key] for key in kept}}
        if limits < 0.85:
            return {"type": "string", "format": self.chance.choice(FORMATS)}
        return {"type": "string", "pattern": self.chance.choice(PATTERNS)}

    def _integer(self, depth: int) -> Any:
        low = self.chance.randint(-1000, 1000)
        limits = {"minimum": low, "maximum": low + self.chance.choice([0, 1, 9, 100, 123_456])}
        exclusive = {"exclusiveMinimum": low, "exclusiveMaximum": low + self.chance.choice([2, 10, 5000])}
        multiple = {"minimum": -100, "maximum": 100, "multipleOf": self.chance.choice([2, 5, 7])}
        only_low = {"minimum": self.chance.choice([0, 1, -5])}
        return {"type": "integer", **self.chance.choice([{}, limits, exclusive, multiple, only_low])}

    def _number(self, depth: int) -> Any:
        low = round(self.chance.uniform(-50, 50), 2)
        limits = {"minimum": low, "maximum": round(low + self.chance.choice([0.5, 3.25, 1000]), 2)}
        exclusive = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
        return {"type": "number", **self.chance.choice([{}, limits, exclusive, {"minimum": 0}, {"maximum": low}])}

    def _boolean(self, depth: int) -> Any:
        return {"type": "boolean"}

    def _enum(self, depth: int) -> Any:
        if self.chance.random() < 0.7:
            return {"type": "string", "enum": self.chance.sample(WORDS, self.chance.randint(1, 6))}
        return {"enum": self.chance.sample(CONSTANTS, self.chance.randint(2, 5))}

    def _constant(self, depth: int) -> Any:
        return {"const": self.chance.choice(CONSTANTS)}

    def _types(self, depth: int) -> Any:
        return {"type": self.chance.choice([["string", "null"], ["integer", "null"], ["string", "number", "boolean"]])}

    def _anything(self, depth: int) -> Any:
        return self.chance.choice([{}, True, {"type": "object"}, {"type": "null"}]) if depth > 1 else {"type": "string"}

    # ------------------------------------------------------------ values with parts

    def _object(self, depth: int) -> Any:
        names = self.chance.sample(WORDS, self.chance.randint(0 if depth else 1, 4))
        if self.chance.random() < 0.4:
            names.append(self.chance.choice(ODD_NAMES[self.names]))
        properties = {name: self.schema(depth + 1) for name in names}
        made: dict[str, Any] = {"type": "object", "properties": properties}
        if self.chance.random() < 0.8:
            made["required"] = [name for name in names if self.chance.random() < 0.7]
        if self.chance.random() < 0.4:
            made["additionalProperties"] = self.chance.choice([False, False, {"type": "integer"}])
        return made

    def _array(self, depth: int) -> Any:
        made = {"type": "array", "items": self.schema(depth + 1)}
        least = self.chance.randint(0, 2)
        return made | self.chance.choice([{}, {"maxItems": least + 2}, {"minItems": least, "maxItems": least + 3}])

    def _tuple(self, depth: int) -> Any:
        items = [self.schema(depth + 1) for _ in range(self.chance.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _map(self, depth: int) -> Any:
        values = self.schema(depth + 1)
        made = {"type": "object", "additionalProperties": values, "maxProperties": self.chance.randint(1, 3)}
        named = {"type": "object", "patternProperties": {"^[a-z]{1,8}$": values}, "additionalProperties": False}
        limited = {**made, "propertyNames": {"pattern": "^[A-Z]{1,3}$"}}
        return self.chance.choice([made, named, limited])

    def _union(self, depth: int) -> Any:
        parts = [self.schema(depth + 1) for _ in range(self.chance.randint(1, 2))]
        return {"anyOf": [*parts, {"type": "null"}]}

    def _tagged_union(self, depth: int) -> Any:
        """Objects of which a property tells the kind."""
        branches = []
        for kind in self.chance.sample(WORDS, 2):
            branch = self._object(depth + 1)
            branch["properties"] = {"kind": {"const": kind}, **branch["properties"]}
            branch["required"] = ["kind", *branch.get("required", [])]
            branches.append(branch)
        return {"oneOf": branches}

    def _all_of(self, depth: int) -> Any:
        name, other = self.chance.sample(WORDS, 2)
        base = {"type": "object", "properties": {name: self.schema(depth + 1)}, "required": [name]}
        return {"allOf": [base, {"properties": {other: {"type": "boolean"}}, "required": [other]}]}

    def _reference(self, depth: int) -> Any:
        """A definition, new or known. One of an object may contain itself."""
        if not self._defs or self.chance.random() < 0.6:
            name = self.chance.choice(["Point", "a/b", "of items~", "ключ", f"D{len(self._defs)}"])
            if name not in self._defs:
                self._defs[name] = {}  # while it is made, others may refer to it: any value
                made = self._object(depth + 1)
                if self.chance.random() < 0.4:
                    made["properties"]["next"] = {"anyOf": [_reference_to(name), {"type": "null"}]}
                self._defs[name] = made
        return _reference_to(self.chance.choice(list(self._defs)))


def _reference_to(name: str) -> dict[str, Any]:
    return {"$ref": "#/$defs/" + name.replace("~", "~0").replace("/", "~1")}


def made_tools(number: int, names: Spelling = "any") -> list[dict[str, Any]]:
    """The tools number `number`: one to three, with different names."""
    chance = random.Random(number)
    called = chance.sample(TOOL_NAMES, chance.choice([1, 1, 2, 3]))
    return [ToolMaker(chance, names).tool(name) for name in called]


def problem_of(tools: Iterable[dict[str, Any]], name: str, written: str) -> str | None:
    """The fault of a call with its arguments as they are written; None if it is valid. `tools`: as chat completions
    take them."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if name not in schemas:
        return f"no tool is called {name!r}"
    try:
        arguments = json.loads(written)
        jsonschema.Draft202012Validator(schemas[name], format_checker=formats.FORMATS).validate(arguments)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0][:300]
    return None if isinstance(arguments, dict) else "the arguments are no object"
