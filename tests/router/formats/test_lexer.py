"""The lexer: what answers in each format stand for, wherever they are cut.

The property test reads `SHOAL_FUZZ_ANSWERS` generated answers, 600 if that is not set.
"""

import json
import os
from typing import Any

import pytest

from router.chat.conversation import Tool
from router.chat.deltas import CallArguments, CallBegin, CallEnd, Delta, TextDelta, ThinkingDelta, joined
from router.formats.choice import detect, named
from router.formats.format import OutputFormat
from router.formats.lexer import Lexer
from tests.router.formats import answers
from tests.router.formats.cases import CALLS, CASES, Case, v31
from worker.formats.families import HARMONY, TOOLS

ANSWERS = int(os.environ.get("SHOAL_FUZZ_ANSWERS", "600"))  # that are generated for the property test
BLOCKS = 14
PROPERTIES = {
    "weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "types": {
        "int": {"type": "integer"}, "float": {"type": "number"}, "bool": {"type": "boolean"},
        "object": {"type": "object"}, "array": {"type": "array"}, "any": {},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "7-zip:pack": {},
}  # fmt: skip
GIVEN = [Tool(name, parameters={"type": "object", "properties": inside}) for name, inside in PROPERTIES.items()]
HERMES = named("hermes", "qwen3")
TOKENS = HERMES.bound({"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4}.get)


def every_way(format: OutputFormat, text: str, marks: dict[int, int] | None = None, **options: Any) -> list[Delta]:
    """The deltas of an answer, after a check that they are the same in one piece, in pieces of each small size, and
    with the marks before the text."""
    found = []
    for size in (len(text) or 1, 1, 2, 3, 7):
        for early in (False, True):
            lexer = Lexer(format, GIVEN, **options)
            deltas: list[Delta] = lexer.push("", marks or {}) if early else []
            for start in range(0, len(text), size):
                inside = {at: n for at, n in (marks or {}).items() if start <= at < start + size}
                deltas += lexer.push(text[start : start + size], {} if early else inside)
            found.append(joined(deltas + lexer.flush()))
    assert all(each == found[0] for each in found)
    return found[0]


def marked(format: OutputFormat, text: str) -> dict[int, int]:
    """Marks at all markers of the text."""
    return {at: at for at in range(len(text)) for marker in format.bound_markers if text.startswith(marker, at)}


def told(deltas: list[Delta]) -> list[Any]:
    """Deltas in the form of `CASES`."""
    said: list[Any] = []
    for delta in deltas:
        match delta:
            case TextDelta(text):
                said.append(text)
            case ThinkingDelta(text):
                said.append(("thinking", text))
            case CallBegin(index, name):
                assert index == sum(isinstance(part, list) for part in said)
                said.append([name, "", "open"])
            case CallArguments(_, text):
                said[-1][1] = text
            case CallEnd(index):
                call = [part for part in said if isinstance(part, list)][index]
                call[2] = ""
    return said


def wanted(expected: list[Any]) -> list[Any]:
    return [
        part if isinstance(part, str) or part[0] == "thinking" else [part[0], part[1], part[2] if len(part) > 2 else ""]
        for part in expected
    ]


@pytest.mark.parametrize(
    ("format", "case"), [pytest.param(name, case, id=f"{name}: {case[0]}") for name in CASES for case in CASES[name]]
)
@pytest.mark.parametrize("bound", [False, True], ids=["characters", "tokens"])
def test_cases(format: str, case: Case, bound: bool) -> None:
    _, text, expected = case
    chosen = named(format, None)
    if bound:
        chosen = chosen.bound({marker: at for at, marker in enumerate(chosen.markers)}.get)
    found = told(every_way(chosen, text, marked(chosen, text)))
    want = wanted(expected)
    for has, part in zip(found, want, strict=False):
        if isinstance(part, list) and isinstance(part[1], dict):
            has[1] = json.loads(has[1])
    assert found == want


def test_every_format_has_cases() -> None:
    assert {*TOOLS, HARMONY} == CASES.keys()
    assert min(map(len, CASES.values())) >= 8


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_answers(block: int) -> None:
    for seed in range(block, ANSWERS, BLOCKS):
        answers.check(seed)


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("text", "thinks", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, [("thinking", "Hm."), "Yes."]),
        ("Hm.\n\nSo.\n</think>\n\nYes.", True, [("thinking", "Hm.\n\nSo."), "Yes."]),
        ("<think>Hm.</think>Yes.", True, [("thinking", "Hm."), "Yes."]),
        ("<think>\n\n</think>\n\nYes.", False, ["Yes."]),
        ("\n\n</think>\n\nYes.", True, ["Yes."]),
        ("<think>Hm", False, [("thinking", "Hm")]),
        ("Hm\n", True, [("thinking", "Hm\n")]),
        ("Hm</thi", True, [("thinking", "Hm</thi")]),
        ("</think> Yes.\n", True, [" Yes.\n"]),
        ("Yes.", False, ["Yes."]),
        ('Hm.</think>\n<tool_call>{"name": "f"}</tool_call>\n', True, [("thinking", "Hm."), ["f", "{}", ""]]),
        ("Say <think> or </think>.", False, ["Say <think> or </think>."]),
        ("<think>Hm.</think><think>So.</think>Yes.", False, [("thinking", "Hm."), "<think>So.</think>Yes."]),
        ("Hm.</think>\n<think>So.</think>Yes.", True, [("thinking", "Hm."), "<think>So.</think>Yes."]),
        ('<tool_call>{"name": "f"}</tool_call><think>So.', False, [["f", "{}", ""], "<think>So."]),
    ],
)
def test_thinking(text: str, thinks: bool, expected: list[Any]) -> None:
    assert told(every_way(HERMES, text, thinks=thinks)) == expected


def test_thinking_between_phrases() -> None:
    granite = named(None, "granite")
    text = "Here is my thought process:\nHm.\n\nHere is my response:\n\nYes."
    assert told(every_way(granite, text)) == [("thinking", "Hm."), "Yes."]
    for text in ("Yes. Here is my response: no.", "Here is my thought, in short", "Here is my tho"):
        assert told(every_way(granite, text)) == [text]
    template = "{% if thinking %}Write after 'Here is my thought process:' and 'Here is my response:'{% endif %}"
    assert detect(template).thinking == granite.thinking


def test_thinking_goes_on_after_what_only_looks_like_a_call() -> None:
    text = 'Is <tool_call> right?\n<tool_call>{"name": "f"}</tool_call> So.'
    assert told(every_way(TOKENS, text, marked(TOKENS, text), thinks=True)) == [
        ("thinking", "Is <tool_call> right?"), ["f", "{}", ""], " So.",
    ]  # fmt: skip
    assert told(every_way(HERMES, text, thinks=True)) == [("thinking", text)]


def test_thinking_begins_again_where_a_token_says_so() -> None:
    text = "<think>Hm.</think><think>So.</think>Yes.<think>Or?</think>No."
    thought = [("thinking", "Hm.So."), "Yes.", ("thinking", "Or?"), "No."]
    assert told(every_way(TOKENS, text, marked(TOKENS, text))) == thought


@pytest.mark.parametrize("calls", [True, False])
def test_a_token_that_ends_no_thinking_is_no_text(calls: bool) -> None:
    text = "Yes.</think> No.</think>"
    assert told(every_way(TOKENS, text, marked(TOKENS, text), calls=calls)) == ["Yes. No."]
    assert told(every_way(HERMES, text, calls=calls)) == [text]  # written with other tokens
    text = "</think>\n\nYes."
    assert told(every_way(TOKENS, text, marked(TOKENS, text), calls=calls)) == ["Yes."]


def test_without_calls_only_thinking_is_looked_for() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert told(every_way(HERMES, f"Hm.</think>{call}\n", thinks=True, calls=False)) == [
        ("thinking", "Hm."),
        f"{call}\n",
    ]
    harmony = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert told(every_way(named(HARMONY, None), harmony, calls=False)) == [harmony]


def test_says_whether_it_is_thinking_and_for_how_long() -> None:
    lexer = Lexer(TOKENS, thinks=True)
    assert lexer.is_thinking
    assert lexer.push("a b c") == [ThinkingDelta("a b c")]
    assert lexer.thinking_tokens(3) == 3
    lexer.push("</think>\n\nd", {5: 4})
    assert not lexer.is_thinking
    assert lexer.thinking_tokens(7) == 4
    lexer.push("<think>e f", {16: 8})
    assert lexer.is_thinking
    assert lexer.thinking_tokens(11) == 6
    lexer.push('<tool_call>{"name": "f"', {26: 11})
    assert not lexer.is_thinking
    assert lexer.thinking_tokens(20) == 6
    again = Lexer(TOKENS, thinks=True)
    again.push("<think>a b</think>", {0: 0, 10: 3})
    assert again.thinking_tokens(9) == 2


# ---------------------------------------------------------------- tokens


def test_a_marker_spelled_by_other_tokens_is_text() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    quoted = f"Write {call} or <think>"
    assert told(every_way(TOKENS, quoted)) == [quoted]
    both = quoted + call
    marks = {at + len(quoted): n for at, n in marked(TOKENS, call).items()}
    assert told(every_way(TOKENS, both, marks)) == [quoted, ["f", "{}", ""]]


def test_a_marker_in_a_value_is_part_of_the_value_unless_a_token_wrote_it() -> None:
    glm = named("glm45", None)
    bound = glm.bound({marker: at for at, marker in enumerate(glm.markers)}.get)
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>\n</tool_call>y</arg_value></tool_call>"
    marks = marked(bound, text)
    first = text.index("</arg_value>")
    quoted = {first, text.index("</tool_call>")}
    assert told(every_way(bound, text, {at: n for at, n in marks.items() if at not in quoted})) == [
        ["f", json.dumps({"a": "x</arg_value>\n</tool_call>y"}), ""]
    ]


def test_the_ids_of_markers() -> None:
    dsml = named("deepseek_v32", None).bound({"\uff5cDSML\uff5c": 9}.get)
    assert TOKENS.marker_ids == {1, 2, 3, 4}
    assert dsml.marker_ids == {9}
    assert dsml.bound_markers == frozenset()


def test_an_unended_call_ends_where_a_token_begins_another() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1<tool_call>{"name": "g"}</tool_call>'
    assert told(every_way(TOKENS, text, marked(TOKENS, text))) == [["f", '{"a": 1', ""], ["g", "{}", ""]]


# ---------------------------------------------------------------- ids, pace


def test_ids() -> None:
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert every_way(named("kimi_k2", None), text)[0] == CallBegin(0, "f", "functions.f:7")
    assert every_way(named("mistral", None), "[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}")[0] == CallBegin(
        0, "f", "abc123XYZ"
    )
    assert TOOLS["kimi_k2"].new_id("f", 3) == "functions.f:3"
    assert len(TOOLS["mistral"].new_id("f", 3)) == 9
    assert TOOLS["hermes"].new_id("f", 3).startswith("call_")


def test_a_number_alone_is_the_only_tool() -> None:
    lexer = Lexer(named("kimi_k2", None), [Tool("f")])
    text = "<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert lexer.push(text)[0] == CallBegin(0, "f", "0")


@pytest.mark.parametrize(
    ("name", "text", "begins"),
    [
        ("hermes", "A <tool_ca", (False, False)),
        ("hermes", "A <tool_call>", (True, False)),
        ("hermes", '<tool_call>\n{"name": "we', (True, False)),
        ("hermes", '<tool_call>\n{"name": "weather"', (False, False)),  # it has begun
        ("hermes", "<tool_call> is", (False, False)),
        ("llama3_json", '{"name": "we', (False, False)),  # may be text
        ("kimi_k3", "<|open|>response<|sep|>Hi.<|close|>resp", (True, True)),
        ("kimi_k3", "<|open|>response<|sep|>Hi.<|close|>resp and", (False, False)),
        ("deepseek_v4", "Hi.<\uff5cDSML\uff5ctool_c", (True, True)),
        (HARMONY, "<|channel|>fin", (True, False)),
        (HARMONY, "<|channel|>final<|message|>Hi", (False, False)),
    ],
)
def test_what_is_held_back_may_be_markup(name: str, text: str, begins: tuple[bool, bool]) -> None:
    for size in (1, 3, len(text)):
        lexer = Lexer(named(name, None), GIVEN)
        for at in range(0, len(text), size):
            lexer.push(text[at : at + size])
        assert (lexer.begins_call(True), lexer.begins_call(False)) == begins


def test_text_is_never_late() -> None:
    lexer = Lexer(HERMES, GIVEN)
    pieces = ["Hel", "lo <", "b> a <too", "l> {", "x}\n", "\n"]
    assert [told(joined(lexer.push(piece))) for piece in pieces] == [
        ["Hel"],
        ["lo "],
        ["<b> a "],
        ["<tool> {"],
        ["x}\n"],
        ["\n"],
    ]


MARKED_TEXT = (HARMONY, "kimi_k3", "cohere_command3")
TRIMS = [name for name, tools in TOOLS.items() if tools.trims]


def test_text_is_late_by_white_space_only_where_that_may_be_markup() -> None:
    assert set(TRIMS) == {"functiongemma", "gemma4", "glm45", "xlam"}
    pieces = ["Hel", "lo ", "<", "b> a \n", "\n", "y ", "z"]
    for name in TRIMS:
        lexer = Lexer(named(name, None), GIVEN)
        found = [told(joined(lexer.push(piece))) for piece in pieces]
        assert found == [["Hel"], ["lo"], [], [" <b> a"], [], [" \n\ny"], [" z"]]
        plain = Lexer(named(name, None), GIVEN, calls=False)
        assert joined(plain.push("Hello \n")) == [TextDelta("Hello \n")]  # no call can follow


@pytest.mark.parametrize("format", [name for name in CASES if name not in MARKED_TEXT])
@pytest.mark.parametrize("space", [" ", "\n\n", "\r\n", " \t\n "])
def test_white_space_between_text_and_a_call(format: str, space: str) -> None:
    """It is text, but for formats that say that it is none."""
    chosen = named(format, None)
    text, call = next((text, call) for _, text, (call, *_) in CASES[format] if isinstance(call, tuple))
    if chosen.tools is not None and chosen.tools.begin and not text.startswith(chosen.tools.begins):
        text = chosen.tools.begin + text
    for bound in (chosen, chosen.bound({marker: at for at, marker in enumerate(chosen.markers)}.get)):
        answer = f"A b.{space}{text}"
        found = told(every_way(bound, answer, marked(bound, answer)))
        assert found[0] == ("A b." if format in TRIMS else f"A b.{space}")
        assert found[1][0] == call[0]
        alone = f"A b.{space}"
        assert told(every_way(bound, alone)) == [alone]


def test_a_call_is_never_late() -> None:
    lexer = Lexer(HERMES, GIVEN)
    assert lexer.push('<tool_call>\n{"name": "f"') == [CallBegin(0, "f")]
    assert lexer.push(', "arguments": {"a": "b') == [CallArguments(0, '{"a": "b')]
    assert lexer.push(" c") == [CallArguments(0, " c")]
    assert lexer.push('"}') == [CallArguments(0, '"}'), CallEnd(0)]
    coder = Lexer(named("qwen3_coder", None), GIVEN)
    assert coder.push("<tool_call>\n<function=weather>") == [CallBegin(0, "weather")]
    assert coder.push("\n<parameter=city>\nNew") == [CallArguments(0, '{"city": "'), CallArguments(0, "New")]
    assert coder.push(' "York') == [CallArguments(0, ' \\"York')]


def test_the_time_for_a_long_answer_grows_with_its_length() -> None:
    """Markers without end, and text that is held back for long, cost no square of the length."""
    for text in (
        '<tool_call>{"' * 3000,
        "<tool_call>" * 3000,
        CALLS * 3000,
        v31("f", "{") * 2000,
        "\n" * 20000,
        "[f(" * 3000,
    ):
        for name in CASES:
            lexer = Lexer(named(name, "qwen3" if name != HARMONY else None), GIVEN)
            for start in range(0, len(text), 64):
                lexer.push(text[start : start + 64])
            lexer.flush()
