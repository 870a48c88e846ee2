"""Every text of a schema's grammar parses and validates; what a grammar cannot promise is refused by name."""

import datetime
import ipaddress
import json
import re
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from worker.structured_output.conversion.schema import START, any_object_rules, schema_to_ebnf
from worker.structured_output.error import GrammarError
from worker.structured_output.rules.ebnf import to_text


def strict(text: bytes):
    """Parses as strictly as JSON's readers come: no NaN, no control characters, no half surrogates."""

    def refuse(name: str):
        raise ValueError(name)

    value = json.loads(text.decode(), parse_constant=refuse)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def check(walker, schema, n: int = 12) -> list:
    """Random texts of a schema's grammar, all of them valid."""
    ebnf = schema_to_ebnf(json.dumps(schema))
    validator = Draft202012Validator(schema)
    values = [strict(text) for seed in range(n) if (text := walker.walk(ebnf, seed)) is not None]
    for value in values:
        validator.validate(value)
    return values


PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40, "description": "full name"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "role": {"enum": ["admin", "user", None, 3, 'über "quoted"'], "default": "user"},
        "height_m": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.75},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/Node",
}
SHAPES = {  # as pydantic writes a discriminated union
    "$defs": {
        "Circle": {
            "type": "object",
            "properties": {
                "kind": {"const": "circle", "type": "string"},
                "radius": {"type": "number", "exclusiveMinimum": 0},
            },
            "required": ["kind", "radius"],
        },
        "Square": {
            "type": "object",
            "properties": {"kind": {"const": "square", "type": "string"}, "side": {"type": "number"}},
            "required": ["kind", "side"],
        },
    },
    "type": "object",
    "properties": {
        "shapes": {
            "type": "array",
            "items": {
                "discriminator": {"propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}],
            },
        },
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
    "required": ["shapes"],
}
CALL = {  # a tool call
    "type": "object",
    "properties": {
        "name": {"const": "get_weather"},
        "arguments": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 14},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
INHERITED = {
    "$defs": {
        "Base": {"type": "object", "properties": {"id": {"type": "integer", "minimum": 1}}, "required": ["id"]},
        "Level": {"enum": ["low", "high"]},
    },
    "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"label": {"type": "string"}}, "required": ["label"]}],
    "properties": {"level": {"allOf": [{"$ref": "#/$defs/Level"}], "description": "how much"}},
}
UNICODE = {
    "type": "object",
    "properties": {"größe": {"const": "π ≈ 3"}, 'a/b~c"\n': {"enum": ["😀", "\u2028", "\x00"]}},
    "minProperties": 2,
}
EITHER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "string"}},
    "anyOf": [{"required": ["a"]}, {"required": ["b"], "properties": {"b": {"const": True}}}],
}
MAPS = {
    "type": "object",
    "properties": {
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
        "by_colour": {
            "type": "object",
            "propertyNames": {"enum": ["red", "blue"]},
            "additionalProperties": {"type": "boolean"},
        },
        "by_code": {
            "type": "object",
            "patternProperties": {"^[A-Z]{2}$": {"type": "null"}},
            "additionalProperties": False,
        },
    },
    "required": ["counts", "by_colour", "by_code"],
    "additionalProperties": {"type": "array", "items": {"type": "boolean"}},
}
TUPLE = {
    "type": "array",
    "prefixItems": [{"type": "string"}, {"type": "integer", "minimum": -5, "maximum": 5}],
    "items": False,
}
ROWS = {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5}
NUMBERS = {
    "type": "array",
    "items": {
        "anyOf": [
            {"type": "integer", "multipleOf": 5, "minimum": -20, "exclusiveMaximum": 20},
            {"type": "number", "minimum": -1.5, "exclusiveMaximum": 0.001},
            {"type": "integer", "exclusiveMinimum": 999},
            {"type": "number", "maximum": -1e6},
        ]
    },
    "minItems": 1,
}
ANYTHING = {"type": "object", "properties": {"payload": {}, "more": True, "never": False}, "required": ["payload"]}
SELF = {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "null"}}, "required": ["v"]}

REAL = {
    "person": (PERSON, [{"name": "Ann", "age": 3, "email": "a.b@c.org", "role": 'über "quoted"', "tags": ["x"]}]),
    "tree": (TREE, [{"value": 1, "children": [{"value": 2}, {"value": 3, "children": []}]}]),
    "shapes": (SHAPES, [{"shapes": [{"kind": "circle", "radius": 0.5}, {"kind": "square", "side": -2}], "note": None}]),
    "call": (CALL, [{"name": "get_weather", "arguments": {"city": "Köln", "unit": "celsius", "days": None}}]),
    "inherited": (INHERITED, [{"level": "low", "id": 7, "label": "x"}]),
    "unicode": (UNICODE, [{"größe": "π ≈ 3", 'a/b~c"\n': "😀"}]),
    "either": (EITHER, [{"a": 1}, {"b": True, "c": "x"}, {"a": 2, "b": False}]),
    "maps": (MAPS, [{"counts": {"x": 1}, "by_colour": {"red": True}, "by_code": {"DE": None}, "extra": [True]}]),
    "tuple": (TUPLE, [["a", -5]]),
    "rows": (ROWS, [[1, True, False], [1, True, True, True, True]]),
    "numbers": (NUMBERS, [[-20, 15, 0.0005, -1.5, 1000, -1000001.5]]),
    "anything": (ANYTHING, [{"payload": [{"a": [None, 1e3, "x"]}], "more": {}}]),
    "self": (SELF, [{"next": {"next": {"v": None}, "v": None}, "v": None}]),
}


@pytest.mark.parametrize("name", REAL)
def test_real_schemas(walker, name):
    schema, instances = REAL[name]
    values = check(walker, schema, 25)
    assert len(values) >= 8
    assert len({json.dumps(v) for v in values}) > (1 if name in ("unicode",) else 4)
    ebnf = schema_to_ebnf(json.dumps(schema))
    for instance in instances:
        Draft202012Validator(schema).validate(instance)
        for separators in ((", ", ": "), (",", ":")):
            assert walker.accepts(ebnf, json.dumps(instance, ensure_ascii=False, separators=separators)), instance


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "a", 'say "hi"\n', "é😀"], [None, 1, ["a"]]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀", "abc"], ["a", "abcd"]),
        ({"type": "string", "minLength": 3}, ["abc", '"""', "a" * 50], ["ab"]),
        ({"type": "string", "maxLength": 300}, ["", "a" * 300], ["a" * 301]),
        ({"type": "string", "minLength": 200}, ["a" * 200, "é" * 250], ["a" * 199]),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ["a", "aaa"], ["", "aaaa", "b"]),
        ({"type": "integer"}, [0, -1, 12345], [1.5, "1"]),
        ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, [1, 2], [0, 3]),
        ({"type": "integer", "multipleOf": 1.0}, [7], [7.5]),
        ({"type": "number"}, [0, -1.5, 2e10, 1e-7], ["1", None]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": 1}, [1.001, 2], [1, 0.999]),
        ({"type": ["string", "null"], "maxLength": 1}, ["a", None], ["ab", 1]),
        ({"type": ["integer", "number"]}, [1, 1.5], [True]),
        ({"minimum": 3}, [3, 3.5], [2.9]),
        ({"enum": [1, "a", [1, {"b": None}], True]}, [1, "a", [1, {"b": None}], True], [2, "b", False]),
        ({"enum": ["a", "bb", "ccc", 4], "type": "string", "maxLength": 2}, ["a", "bb"], ["ccc", 4]),
        ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {}]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 0}, [[]], [[1]]),
        ({"type": "array", "maxItems": 2, "minItems": 1, "items": {"const": 0}}, [[0], [0, 0]], [[], [0] * 3]),
        ({"type": "array", "items": {"const": 0}, "minItems": 9, "maxItems": 400}, [[0] * 9, [0] * 400], [[0] * 8]),
        ({"type": "array", "items": {"const": 0}, "minItems": 130, "maxItems": 300}, [[0] * 130], [[0] * 301]),
        ({"type": "array"}, [[], [1, "a", {}]], [{}]),
        ({"type": "object", "properties": {"a": {"const": 1}}}, [{}, {"a": 1}], [{"b": 1}, {"a": 2}]),
        ({"type": "object", "required": ["x"]}, [{"x": 1}, {"x": {}}], [{}]),
        ({"type": "object", "required": ["x"], "additionalProperties": {"type": "null"}}, [{"x": None}], [{"x": 1}]),
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
        ({"type": "object", "properties": {"ab": {"const": 1}}, "additionalProperties": {}}, [{"abc": 3}], [{"ab": 2}]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}, {}]),
        ({"properties": {"a": {}, "b": {}}, "required": ["a"], "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 1}]),
        ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
        ({"properties": {"a": {}, "b": {}}, "propertyNames": {"pattern": "a"}}, [{"a": 1}], [{"b": 1}]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}], "type": "integer"}, [1], ["a"]),
        ({"type": "string", "anyOf": [{"maxLength": 1}, {"const": "abc"}]}, ["a", "abc"], ["ab"]),
        ({"allOf": [{"minimum": 2}, {"maximum": 4}, {"type": "integer"}]}, [2, 3, 4], [1, 5]),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, [1], [1.5]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": None}]}, [1, "a", None], [[]]),
        ({"$defs": {"a b": {"type": "null"}}, "items": {"$ref": "#/$defs/a%20b"}, "type": "array"}, [[None]], [[1]]),
        ({"$ref": "#/definitions/x~1y", "definitions": {"x/y": {"const": 1}}}, [1], [2]),
        ({"$ref": "#/$defs/s", "maxLength": 2, "$defs": {"s": {"type": "string"}}}, ["ab"], ["abc"]),
        ({"type": "string", "x-unknown": 1, "title": "t", "format": "password"}, ["a"], [1]),
    ],
)  # fmt: skip
def test_a_keyword_means_what_it_says(walker, schema, good, bad):
    ebnf = schema_to_ebnf(json.dumps(schema))
    for value in good:
        Draft202012Validator(schema).validate(value)
        assert walker.accepts(ebnf, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not walker.accepts(ebnf, json.dumps(value, ensure_ascii=False)), value
    check(walker, schema)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"items": {"type": "null"}}}, "not at # .*items"),
        ({"not": {"not": {"pattern": "a", "minLength": 1}}}, "not at #.*more narrowly"),
        ({"oneOf": [{"not": {"type": "integer"}}, {"type": "number"}]}, "oneOf at #.*more narrowly"),
        ({"type": "object", "properties": {"x": {"if": {"uniqueItems": True}}}}, "if at #/properties/x"),
        ({"items": {"items": {"const": 0.5}, "uniqueItems": True, "minItems": 2}}, "uniqueItems at #/items"),
        ({"type": "array", "contains": {"const": 1}}, "contains at #"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies at #"),
        ({"anyOf": [{"type": "null"}, {"unevaluatedItems": False}]}, "unevaluatedItems at #/anyOf/1"),
        ({"type": "object", "unevaluatedProperties": {"type": "null"}}, "unevaluatedProperties at #"),
        ({"type": "integer", "multipleOf": 7}, "multipleOf at #"),
        ({"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1}, "multipleOf at #"),
        ({"type": "string", "pattern": "a(?=b)"}, "pattern at #: .*look-ahead"),
        ({"type": "object", "minProperties": 2}, "minProperties at #"),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, "maxProperties at #"),
        ({"type": "object", "patternProperties": {"a": {}}, "propertyNames": {"maxLength": 1}}, "propertyNames at #"),
        ({"properties": {"ab": {}}, "patternProperties": {"^(?=a)": {}}}, "patternProperties at #"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf at #.*branches 0 and 1"),
        ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "type": "object"}, "oneOf at #"),
        ({"$ref": "http://example.com/schema"}, r"\$ref at #: only references into"),
        ({"$ref": "#/$defs/gone"}, "there is no '#/\\$defs/gone'"),
        ({"$ref": "#named"}, r"\$ref at #"),
        ({"$dynamicRef": "#x"}, r"\$dynamicRef at #"),
        ({"properties": {"a": {"$id": "http://x/y"}}}, r"\$id at #/properties/a"),
        ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself"),
        ({"allOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"}, "multipleOf is given twice"),
        ({"type": "array", "allOf": [{"prefixItems": [{}]}, {"items": {}}]}, "prefixItems at #"),
        ({"type": "strin"}, "not valid at #/type"),
        ({"properties": {"a": {"minLength": -1}}}, "not valid at #/properties/a/minLength"),
        ({"type": "number", "exclusiveMinimum": True}, "not valid at #/exclusiveMinimum"),
        ({"items": [{}]}, "not valid at #/items"),
        ([], "not valid at #"),
        (False, "no value satisfies"),
        ({"enum": []}, "no value satisfies"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "no value satisfies"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "no value satisfies"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "no value satisfies"),
        ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "no value satisfies"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value satisfies"),
        ({"allOf": [{"enum": [1, 2]}, {"enum": [3]}]}, "no value satisfies"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "no value satisfies"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value satisfies"),
        ({"$ref": "#"}, "no value satisfies"),
    ],
)  # fmt: skip
def test_what_cannot_be_promised_is_refused(schema, reason):
    with pytest.raises(GrammarError, match=reason):
        schema_to_ebnf(json.dumps(schema))


@pytest.mark.parametrize("text", ["", "{", '{"type": }', "NaN", '{"minimum": Infinity}', "[" * 100_000])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(GrammarError, match="not valid JSON"):
        schema_to_ebnf(text)


def test_a_schema_nested_too_deeply_is_refused():
    with pytest.raises(GrammarError, match=r"nested too deeply|not valid JSON"):
        schema_to_ebnf('{"items":' * 5_000 + "{}" + "}" * 5_000)


def test_branches_without_an_end_are_never_entered(walker):
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/loop"}, "b": {"const": 1}}}
    endless["$defs"] = {"loop": {"type": "array", "items": {"$ref": "#/$defs/loop"}, "minItems": 1}}
    assert {json.dumps(v) for v in check(walker, endless)} == {"{}", '{"b": 1}'}


def test_there_is_little_room_for_whitespace(walker):
    ebnf = schema_to_ebnf(json.dumps({"type": "object"}))
    assert walker.accepts(ebnf, '{"a": [1, {"b":2}],"c": 3}')
    for text in (' {"a":1}', '{ "a":1}', '{"a" :1}', '{"a":  1}', '{"a":\n1}', '{"a":1 }', '{"a":1} ', '{"a":[1 ,2]}'):
        assert not walker.accepts(ebnf, text)


def test_json_objects(walker):
    ebnf = to_text(any_object_rules(), START)
    values = [strict(text) for seed in range(60) if (text := walker.walk(ebnf, seed)) is not None]
    assert len(values) > 20 and all(isinstance(v, dict) for v in values)
    assert walker.accepts(ebnf, '{"a": {"b": [1, 2.5e-3, null, true, "\\u00e9\\ud83d\\ude00\\n"]}}')
    for text in (
        "[]",
        "1",
        "",
        '{"a"}',
        '{"a":01}',
        '{"a":"\\ud800"}',
        '{"a":"\\ude00"}',
        '{"a":"\t"}',
        '{"a":NaN}',
        "{,}",
    ):
        assert not walker.accepts(ebnf, text)


# ---------------------------------------------------------------- formats


def is_duration(text: str) -> bool:
    return re.fullmatch(r"P(?!$)(\d+Y)?(\d+M)?(\d+D)?(T(?!$)(\d+H)?(\d+M)?(\d+S)?)?|P\d+W", text) is not None


FORMAT_READERS = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "duration": lambda text: is_duration(text) or pytest.fail(text),
    "email": lambda text: re.fullmatch(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)+", text) or pytest.fail(text),
    "hostname": lambda text: (
        re.fullmatch(r"(?=.{1,253}$)(?!-)[a-zA-Z0-9-]{1,63}(?<!-)(\..+)*", text) or pytest.fail(text)
    ),
    "uri": lambda text: re.fullmatch(r"[a-z][a-z0-9+.-]*:[!-~]+", text) or pytest.fail(text),
}
FORMAT_EXAMPLES = {
    "date": ["2024-02-29", "2000-02-29", "1999-12-31"],
    "time": ["23:59:59Z", "00:00:00.123456789+05:30"],
    "date-time": ["2026-11-21T12:00:00Z"],
    "uuid": ["123E4567-e89b-12d3-a456-426614174000"],
    "ipv4": ["255.0.19.1"],
    "ipv6": ["2001:db8:0:0:0:0:0:1", "::1", "::", "FE80::1:2", "1:2:3:4:5:6:7::", "1::8"],
    "duration": ["P1Y2M3D", "PT5M", "P2W", "P1DT12H"],
    "email": ["john.doe+x@mail.example.com", "o'brien=1@example.com"],
    "hostname": ["localhost", "a.b-c.example"],
    "uri": [
        *("https://example.com:8080/a/b?q=1&r=2#top", "mailto:a@b.c", "urn:isbn:0451450523"),
        "http://ann:x@[::1]:65535/%C3%A4?a=b/c?d#/e",
        "file:///etc/hosts",
        "git+ssh://h.example/a.git",
        "s3://b/k%20",
    ],
}


@pytest.mark.parametrize("name", FORMAT_READERS)
def test_formats_are_read_by_those_who_know_them(walker, name):
    schema = {"type": "string", "format": name}
    values = check(walker, schema, 40)
    assert len(values) > 10
    for value in values:
        FORMAT_READERS[name](value)
    for example in FORMAT_EXAMPLES[name]:
        assert walker.accepts(schema_to_ebnf(json.dumps(schema)), json.dumps(example)), example


@pytest.mark.parametrize("day", ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-00-10", "2024-01-00"])
def test_days_that_never_were(walker, day):
    assert not walker.accepts(schema_to_ebnf('{"type": "string", "format": "date"}'), json.dumps(day))


# ---------------------------------------------------------------- schemas at random

names = st.sampled_from(["a", "b", "ab", "é", 'q"'])
small = st.integers(0, 3)
limits = st.integers(-30, 30) | st.sampled_from([-2.5, 0.1, 0.25, 1e-3, 7.75])
scalars = (
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "a", "ü\n", 1.5]) | st.just([1, {"a": None}])
)


def some(**keywords: st.SearchStrategy) -> st.SearchStrategy:
    """A schema with any of these keywords."""
    return st.fixed_dictionaries({}, optional=keywords)


def typed(name: str, **keywords: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(some(**keywords), st.booleans()).map(lambda p: {**({"type": name} if p[1] else {}), **p[0]})


strings = typed(
    "string",
    minLength=small,
    maxLength=small,
    pattern=st.sampled_from(["^a*$", "^[a-c]{1,2}$", "b", "^(é|\\d)+$"]),
    format=st.sampled_from(["date", "uuid", "ipv4", "custom"]),
)
numbers = typed(
    "number",
    minimum=limits,
    maximum=limits,
    exclusiveMinimum=limits,
    exclusiveMaximum=limits,
    multipleOf=st.sampled_from([1, 3]),
)
integers = numbers.map(lambda s: {**s, "type": "integer"})
leaves = st.one_of(
    strings,
    numbers,
    integers,
    st.sampled_from(
        [
            True,
            False,
            {},
            {"type": "null"},
            {"type": "boolean"},
            {"$ref": "#/$defs/x"},
            {"$ref": "#/$defs/y"},
            {"$ref": "#"},
        ]
    ),
    st.lists(scalars, max_size=3).map(lambda v: {"enum": v}),
    scalars.map(lambda v: {"const": v}),
    st.sampled_from([{"type": ["string", "null", "integer"]}, {"type": ["array", "number"]}]),
)


def nested(inner: st.SearchStrategy) -> st.SearchStrategy:
    several = st.lists(inner, min_size=1, max_size=3)
    objects = typed(
        "object",
        properties=st.dictionaries(names, inner, max_size=3),
        required=st.lists(names, max_size=2, unique=True),
        additionalProperties=inner,
        minProperties=small,
        maxProperties=small,
        propertyNames=st.sampled_from([True, {"maxLength": 1}, {"enum": ["a", "é"]}]),
        patternProperties=st.dictionaries(st.sampled_from(["^a", "b$", "^zz$"]), inner, max_size=1),
        unevaluatedProperties=st.booleans(),
    )
    arrays = typed("array", items=inner, prefixItems=several, minItems=small, maxItems=small, uniqueItems=st.booleans())
    combined = some(anyOf=several, allOf=several, oneOf=several)
    both = st.tuples(st.one_of(objects, arrays, leaves.filter(lambda s: isinstance(s, dict))), combined).map(
        lambda p: {**p[1], **p[0]}
    )
    return st.one_of(objects, objects, arrays, combined, both)


schemas = st.recursive(leaves, nested, max_leaves=8)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(schema=schemas, x=schemas, y=leaves)
def test_schemas_at_random_are_kept_or_refused(walker, schema, x, y):
    if isinstance(schema, dict):
        schema = {**schema, "$defs": {"x": x, "y": y}}
    try:
        check(walker, schema, 6)
    except GrammarError:
        return


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
            [{"a": 1, "c": 1}, {"b": 1, "c": 1}],
            [{"a": 1}, {}],
        ),
        (
            {"properties": {"a": {}, "b": {}}, "required": ["b"], "minProperties": 2, "additionalProperties": {}},
            [{"b": 1, "x": 1}, {"a": 1, "b": 1}],
            [{"b": 1}],
        ),
        (
            {"properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": {}},
            [{"b": 1}, {"x": 1, "y": 1}],
            [{}],
        ),
        (
            {"dependentRequired": {"a": ["b"]}, "properties": {"a": {}, "b": {}}},
            [{"a": 1, "b": 1}, {"b": 1}, {}],
            [{"a": 1}],
        ),
        (
            {"dependentSchemas": {"a": {"properties": {"b": {"const": 2}}}}, "properties": {"a": {}, "b": {}}},
            [{"a": 1, "b": 2}, {"a": 1}, {"b": 3}],
            [{"a": 1, "b": 3}],
        ),
        (
            {"items": {"enum": ["x", 2, None]}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
            [["x"], [None, "x"], [2, None]],
            [[], ["x", "x"], ["x", 2, None]],
        ),
        ({"items": {"enum": list("abcdefgh")}, "uniqueItems": True}, [[], ["a", "h"], list("abcdefgh")], [["a", "a"]]),
        ({"items": {"type": "boolean"}, "uniqueItems": True}, [[True, False], [False]], [[True, True]]),
        ({"type": "string", "uniqueItems": True}, ["a"], []),
        ({"not": {"type": ["object", "array", "string"]}}, [1.5, None, True], ["a", [], {}]),
        ({"not": {"enum": ["a", "", 3, None, True]}}, ["b", 2, 4.5, False, [], {}], ["a", "", 3, None, True]),
        ({"enum": ["a", "b"], "not": {"const": "b"}}, ["a"], ["b"]),
        ({"type": "string", "not": {"anyOf": [{"const": "a"}, {"enum": ["ab"]}]}}, ["b", "abc"], ["a", "ab"]),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
            [{}, {"a": 1}],
            [{"a": 1, "b": 1}],
        ),
        ({"type": "integer", "not": {"minimum": 3}}, [2], [3]),
        ({"type": "string", "not": {"minLength": 2}}, ["", "a"], ["ab"]),
        (
            {
                "type": "object",
                "properties": {"k": {"enum": ["x", "y"]}, "n": {"type": "integer"}},
                "required": ["k"],
                "if": {"properties": {"k": {"const": "x"}}},
                "then": {"required": ["n"]},
                "else": {"properties": {"n": False}},
            },
            [{"k": "x", "n": 1}, {"k": "y"}],
            [{"k": "x"}, {"k": "y", "n": 1}],
        ),
        ({"if": {"type": "string"}, "then": {"const": "a"}, "else": {"type": "null"}}, ["a", None], ["b", 1]),
        ({"$ref": "#n", "$defs": {"a": {"$anchor": "n", "type": "null"}}}, [None], [1]),
        ({"$id": "http://x/y", "$ref": "http://x/y#/$defs/a", "$defs": {"a": {"type": "null"}}}, [None], [1]),
        ({"items": {"$dynamicRef": "#n"}, "$dynamicAnchor": "n", "type": "array"}, [[[], [[]]]], [1, [1]]),
    ],
)
def test_what_is_counted_dependent_and_named(walker, schema, right, wrong):
    ebnf = schema_to_ebnf(json.dumps(schema))
    assert [walker.accepts(ebnf, json.dumps(value)) for value in right] == [True] * len(right)
    assert [walker.accepts(ebnf, json.dumps(value)) for value in wrong] == [False] * len(wrong)
    judge = Draft202012Validator(schema)
    assert all(map(judge.is_valid, right)) and not any(map(judge.is_valid, wrong))
    walked = [text for text in (walker.walk(ebnf, seed) for seed in range(8)) if text is not None]
    assert walked and all(judge.is_valid(json.loads(text)) for text in walked)
