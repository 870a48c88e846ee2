"""What a validator accepts, a grammar can write, order and spaces aside; and nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from bench.schemas.natural import is_writable, made_schema, natural
from worker.messages import Grammar
from worker.structured_output import GrammarCompiler
from worker.structured_output.error import GrammarError

pytestmark = pytest.mark.slow

QUOTES = 'He said "go" to C:\\Users\\ann\\x.\n\tNext line: <b>a < b</b> & 😀 é \u2028 \u0001'
LONG = (QUOTES + " ") * 20
URL = "https://example.com/a%20b?q=1"
BIG = 1_234_567_890_123_456_789


def of(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "maxLength 100": (of(maxLength=100), ["", QUOTES, '"' * 100, "\\" * 100, "😀" * 100], ['"' * 101]),
    "maxLength 2,000": (of(maxLength=2_000), [LONG, "\n" * 2_000], ["é" * 2_001]),
    "maxLength 100,000": (of(maxLength=100_000), [LONG * 5, '"' * 3_000], ["\n" * 100_001]),
    "minLength 200": (of(minLength=200), [LONG, '"' * 200], ["\\" * 199]),
    "lengths": (of(minLength=600, maxLength=1_700), ["\n" * n for n in (600, 1_024, 1_700)], ["a" * 599, "a" * 1_701]),
    "exactly": (of(minLength=513, maxLength=513), ["\n" * 513], ["a" * 512, "a" * 514]),
    "not": ({"type": "string", "not": {"enum": ['say "hi"', "a/b", ""]}}, [QUOTES, "a"], ['say "hi"', "a/b", ""]),
    "not and maxLength": ({"type": "string", "maxLength": 9, "not": {"const": '"'}}, ["\n", '""'], ['"', "x" * 10]),
    "begins": (of(pattern="^https?://"), [URL, "http://"], ["xhttp://", ""]),
    "begins, minLength": (of(pattern="^https?://", minLength=12), [URL], ["http://a"]),
    "has": (of(pattern="@", maxLength=20), ["a@b", '"@\n'], ["ab", "@" * 21]),
    "has any": (of(pattern=r"\S"), ["Alice Smith", " x\n"], [" \n", ""]),
    "ends": (of(pattern=r"\.py$"), ["a b/c.py", '".py'], ["x.pyc"]),
    "version": (of(pattern=r"^\d+\.\d+\.\d+"), ["1.20.3", "1.2.3-rc.1+é"], ["v1.2.3", "1.2"]),
    "branches": (of(pattern="^(http|ftp)://|^/|#$"), ["http://x", "/a\n", "x#"], ["x/", "#x"]),
    "any text": (of(pattern=r"^[\s\S]+$", maxLength=5_000), [QUOTES, LONG], [""]),
    "one line": (of(pattern="^[^\\n]+$"), ['C:\\a "b"'], ["a\nb", ""]),
    "dots": (of(pattern="^.{1,50}$"), ['a "b" \\c', "😀" * 50], ["", "a" * 51]),
    "counted": (of(pattern="^(?:ab){126,260}$"), ["ab" * 126, "ab" * 260], ["ab" * 125, "ab" * 261]),
    "letters": (of(pattern=r"^\p{L}+$"), ["Zoë", "図書館", "Ω"], ["a1", ""]),
    "pattern and format": (of(format="email", pattern="@example"), ["ann@example.com"], ["ann@x.com", "example"]),
    "two patterns": ({"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "^.b"}]}, ["abba", 'ab"'], ["a", "bb"]),
    "integer": ({"type": "integer"}, [BIG, -BIG, 10**30, 0], [1.5]),
    "64 bits": ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [BIG, 0, 2**64 - 1], [-1, 2**64]),
    "20 digits": ({"type": "integer", "minimum": 10**19}, [10**19, 10**25], [10**19 - 1, 0]),
    "card": ({"type": "integer", "exclusiveMinimum": 0}, [4_111_111_111_111_111, 1], [0, -BIG]),
    "number": ({"type": "number"}, [BIG, 0.1 + 0.2, 1e-7, 1e300, 5e-324, 1.7976931348623157e308], ["1"]),
    "positive": ({"type": "number", "minimum": 0}, [1e-7, 0.1 + 0.2, 6.02e23, 0, BIG], [-1e-7, -1]),
    "more than 0": ({"type": "number", "exclusiveMinimum": 0}, [1e-7, 1e-300, 1e30], [0, 0.0, -0.0, -1]),
    "tiny": ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-11}, [1e-11, 1.5e-12], [0, 2e-11, 1]),
    "share": ({"type": "number", "minimum": 0, "maximum": 1}, [1e-7, 0.1234567890123456789, 1, 1.0], [1.0000001, 2]),
    "doubles": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        [0, 0.1 + 0.2, -BIG, 1e-300, 1e200, -9.9e307, 1.7976931348623157e308, 5e-324, 10**99],
        [10**400, -(10**400)],
    ),
    "positive doubles": (
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1.7976931348623157e308},
        [0, 1e-300, 1e307, BIG + 0.0],
        [-1, 1.7976931348623157e308],
    ),
    "floats": (
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        [3.4028234663852886e38, -3.4e38, 0.5, 10**38],
        [3.5e38, -4e38, 10**39],
    ),
    "a hundred digits": (
        {"type": "number", "minimum": -1e99, "maximum": 1e100},
        [10**99, 1e99, 1e100, -9.5e98, 0.25],
        [2e100, -2e99],
    ),
    "far from zero": ({"type": "number", "minimum": 1e200}, [1e200, 1.5e300], [0, 1e199, -1e201]),
    "all of an integer's digits": (
        {"type": "integer", "minimum": 0, "maximum": 1.7976931348623157e308},
        [BIG, 0, 10**99],
        [-1, 10**400],
    ),
    "anything": ({}, [QUOTES, BIG, [1e-7, {'a"b\\\n': BIG}], None], []),
    "others": (
        {"type": "object", "properties": {"a/é": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        [{"a/é": None, 'q"\\\n😀': BIG}, {"b": 1}],
        [{"a/é": 1}, {"b": None}],
    ),
    "names": (
        {"type": "object", "propertyNames": {"maxLength": 5, "pattern": "[a-z]"}, "additionalProperties": True},
        [{'a"\\\n': QUOTES}, {"a": 1, "b": 2}],
        [{"abcdef": 1}, {"A": 1}],
    ),
    "names and properties": (
        {"properties": {"a": {}, "B": {}}, "propertyNames": {"pattern": "^[a-z]"}, "additionalProperties": {}},
        [{"a": 1, 'b"': 2}, {}],
        [{"B": 1}, {"'": 1}],
    ),
    "patterns of names": (
        {
            "type": "object",
            "patternProperties": {"_id$": {"type": "integer"}, "^x-": {"type": "string"}},
            "additionalProperties": {"type": "null"},
        },
        [{'a"_id': BIG}, {"x-é\n": QUOTES}, {"xylo": None, "id_": None}],
        [{"a_id": "x"}, {"x-a": 1}, {"x-a_id": 1}, {"b": 1}],
    ),
}


@pytest.fixture(scope="module")
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(folder, 257, 20.0, [256])
    yield found
    found.close()


@pytest.mark.parametrize("name", CASES)
def test_valid_values_can_be_written_and_no_others(name: str, compiler: GrammarCompiler) -> None:
    schema, good, bad = CASES[name]
    matcher = compiler.submit(Grammar("json_schema", json.dumps(schema))).result().matcher
    for value in good:
        assert is_writable(matcher(), value), value
    for value in bad:
        assert not is_writable(matcher(), value), value
    if r"\p" not in json.dumps(schema).replace("\\\\", "\\"):
        judge = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        assert all(map(judge.is_valid, good)) and not any(map(judge.is_valid, bad))


def test_natural_values_can_be_written_and_no_others(compiler: GrammarCompiler) -> None:
    values = 0
    for seed in range(30):
        schema = made_schema(seed)
        good, bad = natural(schema, str(seed), 6)
        found = compiler.submit(Grammar("json_schema", json.dumps(schema)))
        if found.exception() is not None:
            assert not good, (schema, found.exception())
            continue
        matcher = found.result().matcher
        for value in good:
            assert is_writable(matcher(), value), (schema, value)
        for value in bad:
            assert not is_writable(matcher(), value), (schema, value)
        values += len(good)
    assert values > 60


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (of(pattern="^a{3}$", minLength=5), "#/properties/x"),
        (of(pattern="^a+$", format="date"), "#/properties/x"),
        ({"type": "integer", "minimum": 0.1, "maximum": 0.9}, "#/properties/x"),
        ({"type": "object", "properties": {"y": {"enum": []}}, "required": ["y"]}, "#/properties/x/properties/y"),
    ],
)
@pytest.mark.parametrize("is_needed", [False, True])
def test_a_part_without_values_is_named_or_left_out(
    schema: Any, place: str, is_needed: bool, compiler: GrammarCompiler
) -> None:
    whole = {"type": "object", "properties": {"x": schema, "z": {"type": "null"}}, "required": ["x"][:is_needed]}
    found = compiler.submit(Grammar("json_schema", json.dumps(whole)))
    if is_needed:
        with pytest.raises(GrammarError, match=place + "$"):
            found.result()
    else:
        assert is_writable(found.result().matcher(), {"z": None})


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "number", "maximum": 1e309}',
        '{"enum": [1e309]}',
        '{"properties": {"a": {"const": [-1e999]}}}',
        '{"type": "string", "maxLength": 1e400}',
        '{"default": 1e309}',
        '{"minimum": ' + "9" * 5_000 + "}",
        '{"items":' * 1_000 + "{}" + "}" * 1_000,
        '{"const":' + "[" * 1_000 + "]" * 1_000 + "}",
        '{"allOf":[' * 1_000 + "{}" + "]}" * 1_000,
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_numbers_and_depth_beyond_what_readers_take_are_refused(
    text: str, strict: bool, compiler: GrammarCompiler
) -> None:
    with pytest.raises(GrammarError):
        compiler.submit(Grammar("json_schema", text, strict=strict)).result()
