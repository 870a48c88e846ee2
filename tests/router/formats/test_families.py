# ruff: noqa: E501
"""The choice of formats from templates, vocabularies and configurations, and the typing of values."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.chat.conversation import Tool
from router.chat.deltas import CallArguments, CallBegin, CallEnd, TextDelta, ThinkingDelta, joined
from router.config import RouterConfig
from router.formats.families import (
    HARMONY,
    PARSERS,
    THINKING,
    THINKING_ALIASES,
    TOOL_ALIASES,
    TOOLS,
    choose,
    detect,
    named,
)
from router.formats.lexer import Lexer
from router.formats.typed_values import as_object, typed, value_types

BAR = "\uff5c"
NONE: Callable[[str], int | None] = {}.get
# What tells the formats in the templates of models: not the templates themselves.
TEMPLATES = {
    "Qwen2.5": ("{% if tools %}within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\"name\": ...}", "hermes", None),
    "Qwen3": ("{% if tools %}<tool_call>{\"name\": ..., }{% endif %}{{ content.split('</think>')[-1] }}<think>", "hermes", "<think>"),
    "Qwen3-Coder": ("{% if tools %}<tool_call>\\n<function=example>\\n<parameter=a>", "qwen3_coder", None),
    "Seed-OSS": ("{%- set begin = '<seed:tool_call>' %}<seed:think><function=example>\\n<parameter=a>", "seed_oss", "<seed:think>"),
    "Llama-3.1": ('{% if tools %}{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json", None),
    "Llama-3.3": ("{% if builtin_tools %}<|python_tag|>", "llama3_json", None),
    "Llama-3.2, pythonic": ("{% if tools %}[func_name1(params_name1=params_value1)]", "pythonic", None),
    "Granite-3.3": ("<|start_of_role|>{% if tools %}with <|tool_call|> followed by a list", "granite", None),
    "Nemotron-Nano-v2": ("{% if tools %}use the format <TOOLCALL>[{\"name\": ...}]</TOOLCALL>{% endif %}<think>", "nemotron_json", "<think>"),
    "Llama-4": ("{% if tools %}<|python_start|>[func_name1(params_name1=params_value1)]", "llama4_pythonic", None),
    "Llama-4, without its markers": ("<|header_start|>{% if tools %}[func_name1(param1=value1)]", "llama4_pythonic", None),
    "LFM2": ('{% if tools %}List of tools: <|tool_list_start|>[', "lfm2", None),
    "LFM2.5": ('{% if tools %}{% set text = "List of tools: [" %}{{ content.split("</think>")[-1] }}', "lfm2", "<think>"),
    "Mistral": ("{% if tools %}[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None),
    "Magistral": ("{% if tools %}[THINK][/THINK][TOOL_CALLS]name[ARGS]", "mistral", "[THINK]"),
    "DeepSeek-R1": (f"<{BAR}tool▁calls▁begin{BAR}> function \\n```json <think>", "deepseek_v3", "<think>"),
    "DeepSeek-V3.1": (f"<{BAR}tool▁calls▁begin{BAR}> </think>", "deepseek_v31", "<think>"),
    "DeepSeek-V3.2": (f"<{BAR}DSML{BAR}function_calls> <think>", "deepseek_v32", "<think>"),
    "GLM-4.5": ("{% if tools %}<tool_call>{name}<arg_key>{key}</arg_key> <think>", "glm45", "<think>"),
    "Kimi-K3": ("{{ '<|open|>' ~ name ~ '<|sep|>' }}{{ '<|close|>' }}", "kimi_k3", "<|open|>think<|sep|>"),
    "Gemma-4": ("{{- '<|channel>thought' -}}{%- if tools -%}{{- '<|tool_call>call:' + name + '{' -}}}<tool_call|>", "gemma4", "<|channel>"),
    "Kimi-K2": ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
    "MiniMax-M2": ("{%- set begin = '<minimax:tool_call>' %}<invoke name= <think>", "minimax_m2", "<think>"),
    "Phi-4-mini": ("{% for m in messages %}{{ m.content }}{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}", "phi4_mini_json", None),
    "Hunyuan-A13B": ("<tool_calls>[{...}]</tool_calls> <think>\n\n</think>\n<answer>\n\n</answer>", "hunyuan_a13b", "<think>"),
    "Hunyuan 3": ("<tool_calls><tool_call>name<tool_sep><arg_key><think></think>", "hy_v3", "<think>"),
    "Olmo-3": ("{% if functions %}<function_calls></function_calls>{% endif %}<think>", "olmo3", "<think>"),
    "Command-A": ("<|START_THINKING|> <|START_ACTION|>[{...}]<|END_ACTION|> <|START_RESPONSE|>", "cohere_command3", "<|START_THINKING|>"),
    "InternLM": ("<|action_start|><|plugin|>", "internlm", None),
    "FunctionGemma": ("<start_function_call>call:", "functiongemma", None),
    "ERNIE-4.5": ("<tool_call>\n{...}\n</tool_call> <think></think><response></response>", "hermes", "<think>"),
    "no tools": ("{% for message in messages %}<|im_start|>{{ message.content }}", "hermes", None),
    "no template": (None, "hermes", None),
}  # fmt: skip


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_template_tells_the_format(model: str) -> None:
    template, tools, thinking = TEMPLATES[model]
    found = detect(template)
    assert found.tools == TOOLS[tools]
    assert (None if found.thinking is None else found.thinking.begin) == thinking
    assert found.channels is None


def test_the_page_about_tools_has_all_formats() -> None:
    page = (Path(__file__).parents[3] / "docs" / "TOOLS.md").read_text()
    _, of_tools, of_thinking = page.split("parser` | m")
    for names, table in (((*TOOLS, HARMONY), of_tools), (THINKING, of_thinking)):
        firsts = [row.split("|")[1] for row in table.split("\n\n")[0].splitlines()[2:]]
        assert sorted(re.findall("`(\\w+)`", " ".join(firsts))) == sorted(names)


def test_harmony() -> None:
    found = detect("<|start|>assistant<|channel|>analysis<|message|>")
    assert found.channels is not None and found.tools is None
    assert detect(None, NONE, {"model_type": "gpt_oss"}) == found == named(HARMONY, None)


def test_a_configuration_tells_where_a_template_does_not() -> None:
    assert detect(None, NONE, {"model_type": "deepseek_v32"}).tools == TOOLS["deepseek_v32"]
    assert detect("<tool_call>", NONE, {"model_type": "mistral"}).tools == TOOLS["hermes"]
    assert detect("plain", NONE, {"model_type": "unheard_of"}).tools == TOOLS["hermes"]


def test_a_vocabulary_tells_of_thinking() -> None:
    found = detect("plain", {"<think>": 7, "</think>": 8}.get)
    assert found.thinking is not None
    assert found.tokens == (("<think>", 7), ("</think>", 8))
    assert detect("plain", {"<think>": 7}.get).thinking is None


def test_names() -> None:
    assert named(None, None).markers == ()
    assert named("hermes", "qwen3").markers == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert all(named(tools, thinking).markers for tools in TOOLS for thinking in THINKING if tools != "pythonic")
    with pytest.raises(KeyError):
        named("unheard_of", None)


def test_other_names() -> None:
    """Each stands for a format that there is, and none hides one."""
    for aliases, known in ((TOOL_ALIASES, TOOLS), (THINKING_ALIASES, THINKING)):
        assert set(aliases.values()) <= {*known, HARMONY}
        assert not aliases.keys() & {*known, *PARSERS}
    for other, name in (("glm47", "glm45"), ("qwen25", "hermes"), ("deepseekv31", "deepseek_v31")):
        assert choose(other, "auto", None) == choose(name, "auto", None)
        assert RouterConfig(tool_call_parser=other).tool_call_parser == other
    for other in ("deepseek-r1", "glm45", "kimi_k2", "minimax_m2", "deepseek_v3", "qwen3-thinking"):
        assert choose("auto", other, None).thinking == THINKING["qwen3"]
    assert choose("auto", "openai_gptoss", None) == choose("gpt-oss", "auto", None) == named(HARMONY, None)
    assert named("glm47", "deepseek-r1") == named("glm45", "qwen3")
    with pytest.raises(ValueError, match="none of that name"):
        RouterConfig(reasoning_parser="glm47_")


@pytest.mark.parametrize("name", ["hunyuan_a13b", "ernie45"])
def test_markers_around_the_text(name: str) -> None:
    before, after = THINKING[name].around
    for text, said in (
        (f"<think>\nHm.\n</think>\n{before}\nYes.\n\nNo.\n{after}", [ThinkingDelta("Hm."), TextDelta("Yes.\n\nNo.")]),
        (f"{before}Yes.{after}", [TextDelta("Yes.")]),
        ("Yes.", [TextDelta("Yes.")]),
    ):
        for size in (1, 3, 99):
            lexer = Lexer(named(None, name))
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert joined([delta for piece in pieces for delta in lexer.push(piece)] + lexer.flush()) == said


def test_a_prompt_that_opens_thinking() -> None:
    assert named(None, "qwen3").opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not named(None, "qwen3").opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not named("hermes", None).opens_thinking("<think>")
    assert named("gemma4", None).opens_thinking("<|turn>model\n<|channel>thought\n")
    assert not named("gemma4", None).opens_thinking("<|turn>model\n<|channel>thought\n<channel|>")


def test_an_instructed_model_calls_as_told() -> None:
    """What the instruction shows as a call is one."""
    tools = TOOLS["hermes"]
    text = tools.instruction
    shown = text[text.index("<tool_call>\n") : text.index("You may call")]
    lexer = Lexer(named("hermes", None))
    assert joined(lexer.push(shown) + lexer.flush()) == [
        CallBegin(0, "the tool's name"), CallArguments(0, '{"an argument\'s name": "its value"}'), CallEnd(0),
    ]  # fmt: skip
    assert "{tools}" in text and "{text}" in tools.result


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "float"}, {"number"}),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, {"object", "null"}),
        ({"oneOf": [{"enum": [1, 2.5]}, {"const": True}]}, {"integer", "number", "boolean"}),
        ({"allOf": [{"$ref": "#/$defs/Point"}]}, {"object"}),
        ({"$ref": "#/$defs/Missing"}, {"string"}),
        ({"$ref": "#/$defs/a~1b%20~0"}, {"integer"}),
        ({"$ref": "#/$defs/~01"}, {"number"}),
        ({"$ref": "#/$defs/~1"}, {"null"}),
        ({"$ref": "#/$defs/~00"}, {"array"}),
        ({"$ref": "#/$defs/Either/anyOf/1"}, {"boolean"}),
        ({"$ref": "#/$defs/Either/anyOf/2"}, {"string"}),
        ({"$ref": "#"}, {"object"}),
        ({"$ref": "#Point"}, {"string"}),
        ({"$ref": "http://x/$defs/Point"}, {"string"}),
        ({"$ref": "#/properties/x"}, {"string"}),  # to itself
        ({"items": {}}, {"array"}),
        ({"enum": ["a", None]}, {"string", "null"}),
        ({}, {"string"}),
        (True, {"string"}),
        ({"type": 3}, {"string"}),
    ],
)
def test_types_of_a_parameter(schema: Any, types: set[str]) -> None:
    either = {"anyOf": [True, {"type": "boolean"}]}
    escaped = {"a/b ~": {"type": "integer"}, "~1": {"type": "number"}, "/": {"type": "null"}, "~0": {"type": "array"}}
    known = {"Point": {"properties": {}}, "Either": either, **escaped}
    parameters = {"properties": {"x": schema}, "$defs": known}
    assert value_types(parameters, "x") == types
    assert value_types(parameters, "y") == value_types({}, "x") == {"string"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", {"integer"}, "12"),
        (" 12\n", {"integer"}, "12"),
        ("1.0", {"integer"}, '"1.0"'),
        ("1e5", {"integer"}, '"1e5"'),
        ("-1E+2", {"integer"}, '"-1E+2"'),
        ("1.5e1", {"integer"}, '"1.5e1"'),
        ("-7", {"integer"}, "-7"),
        ("012", {"integer"}, "12"),
        ("-007", {"number"}, "-7"),
        ("+5", {"integer"}, "5"),
        ("0", {"integer"}, "0"),
        ("00.50", {"number"}, "0.50"),
        ("012", {"string", "integer"}, '"012"'),
        ("1e5", {"number"}, "1e5"),
        ("1e5", {"integer", "number"}, "1e5"),
        ("-1.5E-2", {"number"}, "-1.5E-2"),
        ("1e999", {"number"}, '"1e999"'),
        ("NaN", {"number"}, '"NaN"'),
        ("TRUE", {"boolean"}, "true"),
        ("yes", {"boolean"}, '"yes"'),
        ("None", {"integer"}, "null"),
        ("None", {"string", "null"}, '"None"'),
        ("null", {"string", "null"}, "null"),
        ("12", {"string", "integer"}, "12"),
        ("x", {"string", "object"}, '"x"'),
        ("{'a': (1, None)}", {"object"}, '{"a": [1, null]}'),
        ("{2, 1}", {"array"}, "[2, 1]"),
        ("{'a': {true, null}, 'b': 'x\ny\x00\rz\\n'}", {"object"}, '{"a": [true, null], "b": "x\\ny\\u0000\\rz\\n"}'),
        ('["""a\n"b" """, "it\'s"]', {"array"}, '["a\\n\\"b\\" ", "it\'s"]'),
        ('{"a": "b\nc\\d"}', {"object"}, '{"a": "b\\nc\\\\d"}'),
        ("[" * 100_000, {"array"}, json.dumps("[" * 100_000)),
        ("[NaN]", {"array"}, '"[NaN]"'),
    ],
)
def test_a_value_by_its_types(text: str, types: set[str], value: str) -> None:
    assert typed(text, frozenset(types)) == value


def test_arguments_become_an_object_where_that_is_clear() -> None:
    assert as_object("null") == as_object('""') == as_object('" "') == "{}"
    assert as_object('" {\\"a\\": 1}"') == '{"a": 1}'
    assert as_object('"[1]"') == '"[1]"'
    assert as_object('"\\x"') == '"\\x"'
    assert as_object("3") == "3"


def test_a_schema_that_is_none_does_no_harm() -> None:
    for parameters in ({}, {"properties": None}, {"properties": {"a": None}}, {"properties": []}):
        lexer = Lexer(named("qwen3_coder", None), [Tool("f", parameters=parameters)])  # type: ignore[arg-type]
        text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
        assert joined(lexer.push(text) + lexer.flush())[1] == CallArguments(0, '{"a": "1"}')
