"""Python functions become tools that a model can read, and calls of them become results that it can read."""

import enum
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

from shoal.chat_tools import DENIED, PythonTool, Toolbox, ToolError, described, load, printable, schema_of, shown
from shoal.client import StreamedCall


class Unit(enum.Enum):
    CELSIUS = "C"
    KELVIN = "K"


def weather(city: str, unit: Unit = Unit.CELSIUS, days: int = 3, *, near: list[str] | None = None) -> dict[str, Any]:
    """The weather of a city,
    as it will be.

    Not read.

    Args:
        city: where,
            by its name
        unit (Unit): of temperatures
    """
    return {"city": city, "unit": unit.name, "days": days, "near": near}


def loose(a, *rest, b: "int" = 1, c: "Nowhere" = None, **more):  # type: ignore # noqa: F821
    """:param a: the first
        of two
    :param int b: the second
    """
    return a


def call(name: str, arguments: str) -> StreamedCall:
    return StreamedCall("1", name, arguments)


# ---------------------------------------------------------------- descriptions


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    tool = described(weather, "weather")
    assert tool.description == "The weather of a city, as it will be."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where, by its name"},
            "unit": {"type": "string", "enum": ["C", "K"], "description": "of temperatures", "default": "C"},
            "days": {"type": "integer", "default": 3},
            "near": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        },
        "required": ["city"],
    }


def test_a_parameter_without_a_type_takes_any_value() -> None:
    tool = described(loose, "loose")
    assert tool.description == ""
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "a": {"description": "the first of two"},
            "b": {"description": "the second", "default": 1},
            "c": {},
        },
        "required": ["a"],
        "additionalProperties": True,
    }


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (tuple[int, str], {"type": "array"}),
        (Optional[str], {"anyOf": [{"type": "string"}, {"type": "null"}]}),  # noqa: UP045
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (Any, {}),
        (Path, {}),
        ("unknown", {}),
    ],
)
def test_types_and_their_schemas(kind: Any, schema: dict[str, Any]) -> None:
    assert schema_of(kind) == schema


# ---------------------------------------------------------------- calls


def test_arguments_are_what_the_function_expects() -> None:
    result = described(weather, "weather").run({"city": "Oslo", "unit": "K"})
    assert json.loads(result) == {"city": "Oslo", "unit": "KELVIN", "days": 3, "near": None}

    def kinds(units: list[Unit], maybe: Unit | None, both: tuple[int, int]) -> str:
        return f"{units} {maybe} {both}"

    result = described(kinds, "kinds").run({"units": ["C", "K"], "maybe": "K", "both": [1, 2]})
    assert result == "[<Unit.CELSIUS: 'C'>, <Unit.KELVIN: 'K'>] Unit.KELVIN (1, 2)"
    assert load("math:sqrt").run({"x": 16}) == "4.0"

    async def slow(n: int) -> int:
        return n + 1

    assert described(slow, "slow").run({"n": 1}) == "2"


def test_what_is_wrong_is_a_result() -> None:
    def exits() -> None:
        raise SystemExit(3)

    tools = Toolbox([described(weather, "weather"), described(exits, "exits"), load("math:sqrt")], allow_all=True)

    def result(name: str, arguments: str) -> str:
        return tools.answer(call(name, arguments), lambda asked: False)

    assert result("sqrt", '{"x": -1}').startswith("error: ValueError: ")
    for given, kind, named in (("", "TypeError", "'city'"), ('{"city": "x", "unit": "F"}', "ValueError", "'F'")):
        told = result("weather", given)
        assert told.startswith(f"error: {kind}: ") and named in told
    assert result("exits", "{}") == "error: SystemExit: 3"
    told = result("sin", "{}")
    assert told.startswith("error: ") and "'sin'" in told and told.endswith(": weather, exits, sqrt")
    for arguments in ('{"x": 1', "[1]", "x"):
        told = result("sqrt", arguments)
        assert told.startswith("error: ") and "JSON" in told and told.endswith(f": {arguments}")


def test_a_call_that_is_not_permitted_does_not_run() -> None:
    ran: list[int] = []
    tools = Toolbox([described(lambda n: ran.append(n), "note")])
    assert tools.answer(call("note", '{"n": 1}'), lambda asked: False) == DENIED and ran == []
    assert tools.answer(call("note", '{"n": 2}'), lambda asked: True) == "null" and ran == [2]
    tools.allowed.add("note")
    assert tools.answer(call("note", '{"n": 3}'), lambda asked: False) == "null" and ran == [2, 3]


# ---------------------------------------------------------------- module:function


def test_modules_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_of_test.py").write_text(
        "print('hello')\nclass A:\n    @staticmethod\n    def f(x: int): return x\n"
    )
    (tmp_path / "broken_of_test.py").write_text("import nowhere_at_all")
    assert load("mine_of_test:A.f").name == "f" and capsys.readouterr().out == ""
    for where, says in [
        ("math", "module:function"),
        ("nowhere_at_all:f", "no module nowhere_at_all,"),
        ("nowhere_at_all.inside:f", "no module nowhere_at_all.inside"),
        ("mine_of_test:g", "no function g"),
        ("math:pi", "pi is not a function"),
        ("broken_of_test:f", "broken_of_test fails: ModuleNotFoundError: "),
    ]:
        with pytest.raises(ToolError) as raised:
            load(where)
        assert says in str(raised.value)


def test_what_cannot_be_described() -> None:
    with pytest.raises(ToolError, match="<lambda>"):
        described(lambda: 1, "<lambda>")
    with pytest.raises(ToolError, match="parameters"):
        described(dict, "dict")
    tool = PythonTool("f", "", {}, weather)
    with pytest.raises(ToolError, match=r"\bf$"):
        Toolbox([tool, tool])


# ---------------------------------------------------------------- what is shown


def test_nothing_in_a_call_is_hidden() -> None:
    assert shown("add", '{"a": 1, "b": "x é"}') == 'add(a=1, b="x é")'
    assert shown("add", "not json\n\x1b[2K") == "add(not json\\n\\x1b[2K)"
    assert shown("add", '{"a": "\\u009b2J\\u202e"}') == 'add(a="\\x9b2J\\u202e")'
    assert printable("a\nb\rc") == "a\nb\\rc"
