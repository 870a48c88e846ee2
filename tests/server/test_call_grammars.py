"""Every text that a grammar of calls allows is read as valid calls, in every format: random texts of the grammars, read
by the lexer and judged by jsonschema.
"""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.chat.conversation import Tool
from router.chat.deltas import CallArguments, CallBegin, CallEnd, TextDelta, ThinkingDelta, joined
from router.formats.families import HARMONY, TOOLS, named
from router.formats.lexer import Lexer
from tests.conftest import NIGHTLY
from tests.server.tool_schemas import Spelling, made_tools, problem_of
from worker.structured_output.compiling.compilation import after, kept_apart
from worker.structured_output.conversion.text_rules import text_rules
from worker.structured_output.error import GrammarError
from worker.structured_output.matching.engines import LLGUIDANCE, XGRAMMAR, needs_llguidance
from worker.structured_output.matching.lazy_grammar import LazyGrammar
from worker.structured_output.matching.lazy_matcher import LazyMatcher, LazyVocabulary
from worker.structured_output.rules.ebnf import START, to_text
from worker.structured_output.rules.lark import to_lark
from worker.structured_output.tokens import GrammarVocabulary
from worker.structured_output.tool_calls.call_formats import MARKERS
from worker.structured_output.tool_calls.tool_calls import tool_call_rules

pytestmark = pytest.mark.slow

Matcher = xgrammar.GrammarMatcher | LazyMatcher

# Sets of tools: nine have each way to call with each way to think once.
SETS, WALKS, MOST_TOKENS = 36 if NIGHTLY else 9, 3, 600
LONGER = """": |", "|"}|"]|}}|]]|true|12|0.5|\n\n|\\"|é|😀|</|</parameter>\n|, ]""".split("|")
ENDERS = ['"', "]", "}", ",", ")", '"}', '"]', "}}", "]]", "</", "<", "</parameter>\n"]
END = "<end of text>"
NAMES: dict[str, Spelling] = dict.fromkeys(("pythonic", "olmo3", "lfm2", "llama4_pythonic"), "python")
TAGGED = ("qwen3_coder", "seed_oss", "glm45", "hy_v3", "kimi_k3", "minimax_m2", "deepseek_v32", "deepseek_v4")
NAMES |= dict.fromkeys(TAGGED, "tags")
FORM = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "why": {"type": "string", "maxLength": 9}},
    "required": ["answer"],
    "additionalProperties": False,
}


class WalkedVocabulary:
    """Bytes, a few longer tokens, and markers; random texts of grammars over these. `bound`: a marker is a token of its
    own, and no text."""

    def __init__(self, folder: Path, markers: tuple[str, ...], bound: bool) -> None:
        alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        plain = [*LONGER, *([] if bound else markers)]
        longer = ["".join(part for part, _ in spell.pre_tokenize_str(text)) for text in plain]
        tokens = {**alphabet, **{text: len(alphabet) + number for number, text in enumerate(longer)}}
        tokenizer = Tokenizer(models.BPE(tokens, []))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(marker, special=True) for marker in markers if bound])
        tokenizer.add_special_tokens([END])
        tokenizer.save(str(folder / "tokenizer.json"))
        self.end = tokenizer.token_to_id(END)
        called = tokenizer.token_to_id("<|call|>")
        self.ends = [self.end] if called is None else [self.end, called]
        self.vocabulary = GrammarVocabulary(folder, self.end + 1, self.ends)
        self._first_marker = len(tokens)
        self._texts = self.vocabulary.token_bytes()
        info = xgrammar.TokenizerInfo(
            self.vocabulary.token_bytes(kept_apart("tool_calls")), xgrammar.VocabType.RAW, stop_token_ids=self.ends
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._lazy = LazyVocabulary(self.vocabulary.lazy_bytes(MARKERS), self.ends)
        self._bitmask = xgrammar.allocate_token_bitmask(1, self.end + 1)
        enders = [token for token in range(self._first_marker) if self._texts[token] in [e.encode() for e in ENDERS]]
        self._enders = np.zeros(self.end + 1, np.uint8)
        self._enders[[*self.ends, *enders, *range(len(alphabet) + len(LONGER), self.end)]] = 1

    def compile(self, ebnf: str, root: str = "root") -> Callable[[], Matcher]:
        grammar = self._compiler.compile_grammar(ebnf, root_rule_name=root)
        return lambda: xgrammar.GrammarMatcher(grammar)

    def compile_calls(self, wanted: dict[str, Any], engine: str = XGRAMMAR) -> Callable[[], Matcher]:
        """The grammar of an answer by `ToolCalls`, followed by this engine if it can."""
        rules, start, lexes = tool_call_rules(json.dumps(wanted), self.vocabulary)
        if lexes and (engine == LLGUIDANCE or needs_llguidance(rules)):
            return LazyGrammar(to_lark(rules, start), self._lazy).matcher
        return self.compile(to_text(rules, start))

    def accepts(self, grammar: Callable[[], Matcher], text: str) -> bool:
        """Whether the whole text, cut at markers that are tokens, is one of the grammar's."""
        matcher = grammar()
        added = self.vocabulary.added
        parts = re.split("|".join(f"({re.escape(marker)})" for marker in added), text)
        tokens = [[added[part]] if part in added else self._bytes(part) for part in parts if part]
        taken = (matcher.accept_token(token) for each in tokens for token in each)
        return all(taken) and matcher.accept_token(self.end)

    def _bytes(self, text: str) -> list[int]:
        return [self._texts.index(bytes([byte])) for byte in text.encode()]

    def walk(self, grammar: Callable[[], Matcher], seed: int) -> tuple[str, dict[int, int]] | None:
        """A random text with its marks, or None if it did not end in time. Never runs into a dead end."""
        matcher = grammar()
        chance = random.Random(seed)
        eagerness = chance.choice([0.1, 0.4, 0.8])  # to end strings, lists, everything
        text, rest, marks = "", b"", {}
        packed = self._bitmask.numpy().view(np.uint8)[0]
        for number in range(MOST_TOKENS):
            matcher.fill_next_token_bitmask(self._bitmask)
            bits = np.unpackbits(packed, count=self.end + 1, bitorder="little")
            assert bits.any(), f"dead end after {text!r} {rest!r}"
            ending = bits & self._enders
            wanted = ending if ending.any() and chance.random() < eagerness else bits
            token = int(chance.choice(wanted.nonzero()[0]))
            assert matcher.accept_token(token)
            if token >= self._first_marker and token != self.end:
                text, rest = text + rest.decode(errors="replace"), b""
                marks[len(text)] = number
                text += self._texts[token].removeprefix(b"\xff").decode()
            elif token != self.end:
                rest += self._texts[token]
            if matcher.is_terminated():
                return text + rest.decode(errors="replace"), marks
        return None


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., WalkedVocabulary]:
    return cache(lambda *given: WalkedVocabulary(tmp_path_factory.mktemp("vocabulary"), *given))


def test_the_tools_use_all_of_the_language_and_come_back_by_number() -> None:
    made = [made_tools(number) for number in range(200)]
    words = """$ref $defs anyOf oneOf allOf enum const prefixItems patternProperties propertyNames additionalProperties
    format pattern minLength maxLength minimum exclusiveMaximum multipleOf minItems maxItems""".split()
    assert [word for word in words if f'"{word}"' not in json.dumps(made)] == []
    assert made[7] == made_tools(7) != made_tools(8)
    for tool in (tool for tools in made[:40] for tool in tools):
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ('{"n": 3, "when": "10:00:00.5Z", "long": "P1DT2H"}', None),
        ('{"n": 4}', "4 "),
        ("{}", "'n' "),
        ('{"n": 1, "when": "25:00:00Z"}', "'25:00:00Z' "),
        ('{"n": 1, "long": "P"}', "'P' "),
        ('{"n": 1', "Expecting "),
        ("[]", "[] "),
    ],
)
def test_a_call_is_judged(written: str, problem: str | None) -> None:
    properties = {"when": {"format": "time"}, "long": {"format": "duration"}, "n": {"maximum": 3}}
    parameters = {"type": "object", "properties": properties, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": "plan", "parameters": parameters}}]
    found = problem_of(tools, "plan", written)
    assert found is None if problem is None else found is not None and found.startswith(problem)
    assert problem_of(tools, "other", written) is not None


@pytest.mark.parametrize("bound", [False, True], ids=["characters", "tokens"])
@pytest.mark.parametrize("name", [*TOOLS, HARMONY])
def test_every_text_is_valid(name: str, bound: bool, walked: Callable[..., WalkedVocabulary]) -> None:
    """With and without thinking, which the prompt or the answer begins; with text of a form as the other choice."""
    format = named(name, None if name == HARMONY or TOOLS[name].thinking else "qwen3")
    pieces = format.tools.pieces if format.tools is not None else ()
    vocabulary = walked(tuple(marker for marker in MARKERS if marker in (*format.markers, *pieces)), bound)
    format = format.bound(vocabulary.vocabulary.added.get)
    calls = texts = thoughts = refused = 0
    for number in range(SETS):
        made = made_tools(number, NAMES.get(name, "any"))
        mode, has_form = [("required", False), ("auto", True), ("auto", False)][number % 3]
        opens, may_think = [(False, False), (True, True), (False, True)][number // 3 % 3]
        thinking = None
        if may_think and format.thinking is not None:
            thinking = {"begin": format.thinking.begin, "end": format.thinking.end, "open": opens}
        wanted = {
            "format": name,
            "tools": [
                {"name": tool["function"]["name"], "parameters": tool["function"]["parameters"], "strict": True}
                for tool in made
            ],
            "mode": mode,
            "parallel": number % 2 == 0,
            "thinking": thinking,
            "form": {"kind": "json_schema", "text": json.dumps(FORM)} if has_form else None,
        }
        try:
            grammar = vocabulary.compile_calls(wanted, LLGUIDANCE if number % 2 else XGRAMMAR)
        except GrammarError:
            refused += 1
            continue
        tools = [Tool(each["function"]["name"], parameters=each["function"]["parameters"]) for each in made]
        for walk in range(2 * WALKS if has_form else WALKS):
            found = vocabulary.walk(grammar, 1000 * number + walk)
            if found is None:
                continue
            text, marks = found
            lexer = Lexer(format, tools, thinks=bool(thinking and opens))
            deltas = joined(lexer.push(text, marks) + lexer.flush())
            begun = [delta for delta in deltas if isinstance(delta, CallBegin)]
            written = {delta.index: delta.text for delta in deltas if isinstance(delta, CallArguments)}
            said = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
            for begin in begun:
                assert problem_of(made, begin.name, written[begin.index]) is None, text
            assert has_form or mode == "auto" or begun, text
            if mode == "required" or (begun and has_form):
                assert not said.strip() or name == HARMONY, text
                ended = sum(isinstance(delta, CallEnd) for delta in deltas)
                assert ended == len(begun) or (name == HARMONY and vocabulary.ends != [vocabulary.end]), text
            if has_form and not begun:
                answer = text.rpartition("<|message|>")[2].removesuffix("<|call|>") if name == HARMONY else said
                jsonschema.validate(json.loads(answer), FORM)
                texts += 1
            assert wanted["parallel"] or mode == "auto" or len(begun) == 1, text
            calls += len(begun)
            thoughts += any(isinstance(delta, ThinkingDelta) for delta in deltas)
    assert calls >= SETS / 2 and texts >= 1 and thoughts >= 1 and refused <= 1


@pytest.mark.parametrize("bound", [False, True], ids=["characters", "tokens"])
@pytest.mark.parametrize("kind", ["regex", "ebnf", "choice"])
def test_thinking_before_a_text(kind: str, bound: bool, walked: Callable[..., WalkedVocabulary]) -> None:
    """It must be there where the prompt has begun it, and may be there otherwise."""
    vocabulary = walked(("<think>", "</think>"), bound)
    asked = {"regex": "[ab]{2}", "ebnf": 'root ::= after after\nafter ::= "a" | "b"', "choice": '["ab", "ba"]'}[kind]
    ebnf = asked if kind == "ebnf" else to_text(text_rules(kind, asked), START)
    texts = {"ab", "hm</think>\n\nab", "<think>hm", "a<think></think>b"}
    thought = {"<think>hm</think>\n\nab", "<think>\n</think>ba"}
    for begin, accepted in ((None, {"hm</think>\n\nab"} | thought), ("<think>", {"ab"} | thought)):
        grammar = vocabulary.compile(*after("</think>", begin, ebnf, vocabulary.vocabulary))
        assert {text for text in texts | thought if vocabulary.accepts(grammar, text)} == accepted
    with pytest.raises(GrammarError, match="empty"):
        after("</think>", "", ebnf, vocabulary.vocabulary)


@pytest.mark.parametrize(
    ("name", "opens", "text"),
    [
        ("kimi_k3", False, "%s<|close|>response<|sep|><|close|>message<|sep|>"),
        (
            "kimi_k3",
            True,
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>%s<|close|>response<|sep|><|close|>message<|sep|>",
        ),
        (HARMONY, False, "<|channel|>final <|constrain|>json<|message|>%s"),
        (HARMONY, False, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>%s"),
    ],
)
def test_a_text_of_a_form_between_markers(
    name: str, opens: bool, text: str, walked: Callable[..., WalkedVocabulary]
) -> None:
    """Without tools, too, where a model writes markers around its text."""
    format = named(name, None)
    assert format.marks_text
    vocabulary = walked(tuple(marker for marker in MARKERS if marker in text), True)
    thinking = None
    if format.thinking is not None:
        thinking = {"begin": format.thinking.begin, "end": format.thinking.end, "open": opens}
    wanted = {"format": name, "tools": [], "thinking": thinking, "form": {"kind": "regex", "text": "[0-9]{2}"}}
    grammar = vocabulary.compile_calls(wanted)
    assert vocabulary.accepts(grammar, text % "42")
    assert not vocabulary.accepts(grammar, text % "4") and not vocabulary.accepts(grammar, "42")


@pytest.mark.parametrize("bound", [False, True], ids=["characters", "tokens"])
def test_gemma_writes_bare_keys_and_strings_between_marks(bound: bool, walked: Callable[..., WalkedVocabulary]) -> None:
    """As Gemma 4's chat template does, without spaces; a name that a bare key would not be read as is a string."""
    vocabulary = walked(("<|tool_call>", "<tool_call|>", '<|"|>'), bound)
    properties = {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"enum": [1, "all"]}},
        "a:b": {"type": "string", "maxLength": 2},
        "any": {"type": "object"},
    }
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    wanted = {"format": "gemma4", "tools": [{"name": "f", "parameters": schema}], "mode": "required"}
    grammar = vocabulary.compile_calls(wanted)
    for inside, is_call in (
        ('city:<|"|>Os"lo\n<|"|>', True),
        ('city:<|"|><|"|>,days:[1,<|"|>all<|"|>],<|"|>a:b<|"|>:<|"|>xy<|"|>', True),
        ('city:<|"|>x<|"|>,any:{a_1:[null,{}],b:<|"|>y<|"|>}', True),
        ('city: <|"|>x<|"|>', False),
        ('city:"x"', False),
        ('<|"|>city<|"|>:<|"|>x<|"|>', False),
        ('city:<|"|>x<|"|>,a:b:<|"|>y<|"|>', False),
        ('city:<|"|>x<|"|>,<|"|>a:b<|"|>:<|"|>xyz<|"|>', False),
        ('city:<|"|>x<|"|>,days:[2]', False),
        ("", False),
    ):
        assert vocabulary.accepts(grammar, f"<|tool_call>call:f{{{inside}}}<tool_call|>") == is_call, inside


def test_a_refusal_says_which_part_is_at_fault(walked: Callable[..., WalkedVocabulary]) -> None:
    vocabulary = walked((), True).vocabulary
    tools: list[Any] = [{"name": "f", "parameters": {"type": "object", "contains": {}}, "strict": True}]
    form = {"kind": "json_schema", "text": '{"contains": {}}'}
    for given, of_text in ({"tools": tools}, False), ({"tools": [{"name": "f"}], "form": form}, True):
        with pytest.raises(GrammarError, match="contains at #") as raised:
            tool_call_rules(json.dumps({"format": "hermes", **given}), vocabulary)
        assert raised.value.of_text == of_text
    for wrong in ({"tools": []}, {"tools": [], "form": form, "mode": "required"}):
        with pytest.raises(GrammarError, match="no tool"):
            tool_call_rules(json.dumps({"format": "hermes", **wrong}), vocabulary)


HARD = 'She said "go" to C:\\tmp\\x.\n\tThen: <b>a < b</b> & 😀 é </parameter </p> <parameter>'
HARD_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 300},
        "path": {"type": "string", "pattern": "^/|\\\\", "minLength": 5, "maxLength": 600},
        "any": {"type": "string", "pattern": r"\S", "not": {"const": "x"}},
        "id": {"type": "integer", "minimum": 1},
        "items": {"type": "array", "items": {"type": "string", "maxLength": 100, "pattern": "<|a"}},
    },
    "required": ["text", "path", "any", "id", "items"],
    "additionalProperties": False,
}
HARD_VALUES = {"text": HARD, "path": f"/usr {HARD}", "any": HARD, "id": 1234567890123456789, "items": [HARD, "<a>"]}
TOO_LONG = {**HARD_VALUES, "text": HARD * 5}
TOO_SHORT = {**HARD_VALUES, "path": "/usr"}
NOT_FOUND = {**HARD_VALUES, "items": ["b"]}


def in_json(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)


def in_tags(before: str, between: str, after: str) -> Callable[[dict[str, Any]], str]:
    return lambda values: "".join(
        f"{before}{name}{between}{value if isinstance(value, str) else in_json(value)}{after}"
        for name, value in values.items()
    )


def in_python(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={in_json(value)}" for name, value in values.items())


CALLS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "hermes": ('<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>', in_json),
    "llama3_json": ('{"name": "f", "parameters": %s}', in_json),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n%s</function>\n</tool_call>",
        in_tags("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "glm45": ("<tool_call>f\n%s</tool_call>", in_tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),
    "seed_oss": (
        "<seed:tool_call>\n<function=f>\n%s</function>\n</seed:tool_call>",
        in_tags("<parameter=", ">", "</parameter>\n"),
    ),
    "pythonic": ("[f(%s)]", in_python),
}


@pytest.mark.parametrize("bound", [False, True], ids=["characters", "tokens"])
@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_hold_what_documents_hold(
    name: str, mode: str, bound: bool, walked: Callable[..., WalkedVocabulary]
) -> None:
    """Quotes, escapes, line ends, markup, long numbers, where strings have limits; and nothing beyond the limits."""
    around, write = CALLS[name]
    format = named(name, None)
    pieces = format.tools.pieces if format.tools is not None else ()
    vocabulary = walked(tuple(marker for marker in MARKERS if marker in (*format.markers, *pieces)), bound)
    tools = [{"name": "f", "parameters": HARD_SCHEMA, "strict": True}]
    grammar = vocabulary.compile_calls({"format": name, "tools": tools, "mode": mode})
    assert vocabulary.accepts(grammar, around % write(HARD_VALUES))
    for wrong in (TOO_LONG, TOO_SHORT, NOT_FOUND):
        assert not vocabulary.accepts(grammar, around % write(wrong)), wrong
    if "arg_" not in around and "(" not in around and name != "llama3_json":
        text = dict(HARD_VALUES, any="a</parameter>b" if "%s</function" in around else "x")
        assert not vocabulary.accepts(grammar, around % write(text))
