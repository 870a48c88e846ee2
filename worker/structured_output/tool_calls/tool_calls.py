"""Answers that may, or must, call tools, as grammars: the arguments of calls are valid by construction.

A tool's schema holds where a call must be made, and where the tool is `strict`. Otherwise its arguments may be any JSON
object. The text between and around calls is free, unless it has a form of its own: then an answer is either such a text
or calls.
"""

import keyword
import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from worker.structured_output.conversion import values
from worker.structured_output.conversion.schema import START, SchemaConverter, refusals
from worker.structured_output.conversion.spelling import JSON, PYTHON, json_without
from worker.structured_output.conversion.text_rules import text_rules
from worker.structured_output.error import GrammarError
from worker.structured_output.json_schema import drafts
from worker.structured_output.json_schema.conjunction import Schema
from worker.structured_output.rules.ebnf import (
    EMPTY,
    NEVER,
    FreeText,
    Node,
    Ref,
    Regex,
    Repeat,
    Terminal,
    Token,
    alt,
    optional,
    prefixed,
    prune,
    seq,
)
from worker.structured_output.tokens import APART, GrammarVocabulary
from worker.structured_output.tool_calls.call_formats import (
    ALIASES,
    FORMATS,
    HARMONY,
    MARKERS,
    CallFormat,
    Quotes,
    Tags,
    Text,
)
from worker.structured_output.tool_calls.markers import Speller, key
from worker.structured_output.tool_calls.other_text import not_beginning
from worker.structured_output.tool_calls.quoted import QuotedConverter, quoted_rules
from worker.structured_output.tool_calls.tagged import TaggedArguments

_NAME = re.compile(r"[\w.:/-]{1,256}")
_LINE_ENDS = Regex("\\n{0,2}")
_FORM = "form_"  # begins the names of the rules of a text that has a form
_ABOUT_PROPERTIES = (
    *("properties", "additionalProperties", "patternProperties", "propertyNames", "required", "minProperties"),
    *("unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"),
)


class ThinkingBefore(msgspec.Struct, forbid_unknown_fields=True):
    """Thinking before the answer, between two markers. `open`: the prompt has begun it; otherwise the answer may begin
    without it."""

    begin: str = "<think>"
    end: str = "</think>"
    open: bool = False


class TextForm(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a text, as a `messages.Grammar` has it: of the kind json_schema, json_object, regex or choice."""

    kind: str
    text: str = ""


class CalledTool(msgspec.Struct):
    """A tool. `index`: its number in the client's list, for messages."""

    name: str
    parameters: Any = None
    strict: bool = False
    index: int | None = None


class ToolCalls(msgspec.Struct, forbid_unknown_fields=True):
    """The text of a grammar of the kind `tool_calls`. `form`: that of an answer without calls; None if it is free."""

    format: str
    tools: list[CalledTool]
    mode: Literal["auto", "required"] = "auto"
    parallel: bool = True
    thinking: ThinkingBefore | None = None
    form: TextForm | None = None


class CallRules(NamedTuple):
    """The rules of an answer by `ToolCalls`.

    | field | meaning |
    | --- | --- |
    | `rules`, `start` | the rules, and the name of the first |
    | `lexes` | whether a text and a call never begin with the same characters, so that lexemes tell them apart |
    """

    rules: dict[str, Node]
    start: str
    lexes: bool


def tool_call_rules(text: str, vocabulary: GrammarVocabulary) -> CallRules:
    """The rules of an answer by `ToolCalls`. Raises GrammarError."""
    try:
        wanted = msgspec.json.decode(text, type=ToolCalls)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"the tools are not as they should be: {error}") from None
    if not wanted.tools and (wanted.form is None or wanted.mode == "required"):
        raise GrammarError("there is no tool to call")
    name = ALIASES.get(wanted.format, wanted.format)
    if name == "mistral" and "[ARGS]" not in vocabulary.added and "[TOOL_CALLS]" in vocabulary.added:
        name = "mistral_list"
    thinking = wanted.thinking
    markers = (*MARKERS, *((thinking.begin, thinking.end) if thinking else ()))
    speller = Speller(markers, vocabulary.added)
    if name == "harmony":
        answer: _Answer = _HarmonyAnswer(wanted, speller, CallFormat((), (), ()), vocabulary)
    elif name in FORMATS:
        answer = _Answer(wanted, speller, FORMATS[name])
    else:
        raise GrammarError(f"calls in the format {wanted.format!r} cannot be constrained")
    return CallRules(answer.pruned(), "answer", not (answer.format.bare and wanted.form is not None))


class _Answer:
    """The grammar of one answer. `rules` has all rules but the first."""

    def __init__(self, wanted: ToolCalls, speller: Speller, format: CallFormat) -> None:
        self.wanted, self.speller, self.format = wanted, speller, format
        if isinstance(format.arguments, Tags):
            self._spelling = json_without(format.arguments.ends)
        else:
            self._spelling = PYTHON if format.arguments == "python" else JSON
        self.rules = (
            quoted_rules(format.arguments, speller)
            if isinstance(format.arguments, Quotes)
            else values.common_rules(self._spelling)
        )
        if isinstance(format.arguments, Tags):
            self.rules["text"] = FreeText(excludes=(*format.arguments.ends, APART))
        self.arguments = [self._arguments(i, tool) for i, tool in enumerate(wanted.tools)]

    def pruned(self) -> dict[str, Node]:
        self.rules["answer"] = self.answer()
        rules = prune(self.rules, "answer")
        if rules is None:
            raise GrammarError("no call of a tool is possible")
        return rules

    def answer(self) -> Node:
        if self.format.around is not None:
            return self._between_markers(*self.format.around)
        if self.wanted.mode == "required":
            return seq(self._thinking(), _LINE_ENDS, self._calls())
        if self.wanted.form is not None:
            calls = [seq(_LINE_ENDS, optional(self._tag()), self._calls())] if self.wanted.tools else []
            return seq(self._thinking(), alt((self.form(self.wanted.form), *calls)))
        if self.format.bare:
            return seq(self._thinking(), alt((self._bare_calls(), self._other())))
        return seq(self._thinking(), self._free_text())

    def call(self, before: Iterable[str | Node] = ()) -> Node:
        """A call of any of the tools. `before`: in place of what stands before the name."""
        node = self.speller.node
        return alt(
            seq(node(*before), Terminal(tool.name), node(*self.format.between), arguments, node(*self.format.after))
            for tool, arguments in zip(self.wanted.tools, self.arguments, strict=True)
        )

    def form(self, form: TextForm) -> Node:
        """Text of a form of its own."""
        try:
            rules = text_rules(form.kind, form.text)
        except GrammarError as error:
            raise GrammarError(str(error), of_text=True) from None
        self.rules |= prefixed(rules, _FORM)
        return Ref(_FORM + START)

    def rule(self, name: str, node: Node) -> Ref:
        self.rules[name] = node
        return Ref(name)

    # ------------------------------------------------------------ the answer as a whole

    def _thinking(self) -> Node:
        thinking = self.wanted.thinking
        if thinking is None:
            return EMPTY
        return self.speller.thinking_before(thinking.end, None if thinking.open else thinking.begin, *MARKERS)

    def _calls(self) -> Node:
        format, node = self.format, self.speller.node
        call = self.rule("call", self.call(format.before))
        more = Repeat(seq(node(*format.separator), call), 0, None) if self.wanted.parallel else EMPTY
        return seq(node(*format.opening), call, more, node(*format.closing))

    def _bare_calls(self) -> Node:
        """Calls that come in free choice with text: what tells them from it is one regular part."""
        format, node = self.format, self.speller.node
        more = Repeat(seq(node(*format.separator), self.rule("call", self.call(format.before))), 0, None)
        rest = seq(more if self.wanted.parallel else EMPTY, node(*format.closing))
        calls: list[Node] = []
        tag = self._tag()
        begins: list[Text] = [(_LINE_ENDS,), *([] if tag == EMPTY else [(_LINE_ENDS, tag)])]
        for begin in begins:
            calls += [
                seq(
                    node(*begin, *format.opening, *format.before, tool.name, *format.between),
                    arguments,
                    node(*format.after),
                )
                for tool, arguments in zip(self.wanted.tools, self.arguments, strict=True)
            ]
        return seq(alt(calls), rest)

    def _free_text(self) -> Node:
        """Text in which the first marker of calls begins one."""
        format = self.format
        begin = format.opening or format.before
        trigger, rest = self._trigger(begin)
        if format.opening:
            call = self.rule("call", self.call(format.before))
            node = self.speller.node
            more = Repeat(seq(node(*format.separator), call), 0, None) if self.wanted.parallel else EMPTY
            self.rule("calls", seq(*rest, call, more, node(*format.closing)))
        else:
            self.rule("calls", self.call(rest))
        return FreeText(((trigger, "calls"),), loops=not format.opening and self.wanted.parallel)

    def _trigger(self, begin: Text) -> tuple[str | int, list[Node]]:
        """The part of `begin` that begins a call in free text, and the part that follows it."""
        assert isinstance(begin[0], str)
        parts = self.speller.parts(begin[0])
        at = next(i for i, part in enumerate(parts) if isinstance(part, Token) or part.text in MARKERS)
        rest = [*parts[at + 1 :], self.speller.node(*begin[1:])]
        if isinstance(parts[at], Token):
            return key(parts[at]), rest
        return "".join(str(key(part)) for part in parts[: at + 1]), rest

    def _between_markers(self, before: str, after: str) -> Node:
        """Text between two markers, then calls. A call that must be made stands alone, as does a text of a form."""
        node, wanted, thinking = self.speller.node, self.wanted, self.wanted.thinking
        begin = node(before) if thinking is not None and thinking.open else EMPTY
        end, calls = node(after), self._calls() if wanted.tools else NEVER
        if wanted.mode == "required":
            rest = seq(end, calls)
        elif wanted.form is not None:
            rest = alt((seq(self.form(wanted.form), end), seq(end, calls)))
        else:
            rest = seq(self.speller.up_to(after), optional(calls))
        return seq(self._thinking() if begin != EMPTY else EMPTY, begin, rest, node(*self.format.last))

    def _tag(self) -> Node:
        tag = self.speller.mark("<|python_tag|>")
        return tag if isinstance(tag, Token) else EMPTY

    def _other(self) -> Node:
        """Text that does not begin as a call does."""
        if self.format.arguments == "python":
            begin = not_beginning("[", [f"{tool.name}(" for tool in self.wanted.tools])
        elif self.format.opening:
            begin = not_beginning("[", ['{"name"'])
        else:
            begin = not_beginning("{", ['"name"'])
        return Regex(begin)

    # ------------------------------------------------------------ names and arguments

    def _arguments(self, number: int, tool: CalledTool) -> Node:
        where = f"tools[{number if tool.index is None else tool.index}].function"
        if _NAME.fullmatch(tool.name) is None:
            raise GrammarError(f"{where}.name: {tool.name!r} cannot be written in a call")
        schema = _closed(tool.parameters)
        exact = self.wanted.mode == "required" or tool.strict
        try:
            with refusals():
                return self._of_schema(f"t{number}", schema) if exact else self._free()
        except GrammarError as error:
            message = drafts.remark(schema, str(error))
            raise GrammarError(f"{where}.parameters: {message} (tool {tool.name!r})") from None

    def _free(self) -> Node:
        """Any arguments."""
        if self.format.arguments == "json" or isinstance(self.format.arguments, Quotes):
            return Ref("object")
        if "free" not in self.rules:
            self.rules["free"] = self._of_schema("free", {"type": "object"})
        return Ref("free")

    def _of_schema(self, prefix: str, schema: Any) -> Node:
        form = self.format.arguments
        if isinstance(form, Quotes):
            converter: SchemaConverter = QuotedConverter(schema, form, self.speller, self.rules, prefix)
        else:
            converter = SchemaConverter(schema, spelling=self._spelling, rules=self.rules, prefix=prefix)
        schema = converter.root
        if not isinstance(schema, dict) or schema.get("type") != "object":
            schema = {"allOf": [schema, {"type": "object"}]}
        if form == "json" or isinstance(form, Quotes):
            node = converter.value(schema, "#")
        elif form == "python":
            node = alt(self._keywords(converter, each) for each in converter.combinations.simple(schema, "#"))
        else:
            tagged = TaggedArguments(form, self.speller, converter)
            if schema == {"type": "object"}:
                node = tagged.any()
            else:
                node = alt(tagged.of(each, "#") for each in converter.combinations.simple(schema, "#"))
        rule = self.rule(f"{prefix}arguments", node)
        if prune(self.rules, rule.name) is None:
            raise converter.nothing(rule)
        return rule

    @staticmethod
    def _keywords(converter: SchemaConverter, schema: Schema) -> Node:
        """Arguments as Python writes them."""
        for word in ("enum", "const", "patternProperties", "propertyNames"):
            if word in schema:
                raise GrammarError(f"{word} at # is not supported for keyword arguments")
        properties, needed, more = converter.properties(schema, "#")
        for name in properties:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise GrammarError(f"properties at #: {name!r} is no name of a keyword argument")
        if not properties:
            if "minProperties" in schema or "maxProperties" in schema:
                raise GrammarError("minProperties and maxProperties at # are not supported for keyword arguments")
            value = converter.value(True if more is None else more, "#/additionalProperties")
            return values.listed([], seq(Regex("[a-zA-Z_][a-zA-Z0-9_]*"), Terminal("="), value), 0, None)
        members = [
            (seq(Terminal(f"{name}="), converter.value(sub, f"#/properties/{name}")), name in needed)
            for name, sub in properties.items()
        ]
        return converter.members(members, None)


class _HarmonyAnswer(_Answer):
    """The grammar of an answer of messages. It has at most one call, which ends it."""

    def __init__(self, wanted: ToolCalls, speller: Speller, format: CallFormat, vocabulary: GrammarVocabulary) -> None:
        super().__init__(wanted, speller, format)
        call = speller.mark(HARMONY.call)
        self._ends_itself = isinstance(call, Token) and call.id in vocabulary.end_ids

    def answer(self) -> Node:
        node, names = self.speller.node, HARMONY
        marks = (names.start, names.channel, names.constrain, names.message, names.call, names.last)
        message = seq(self.speller.up_to(names.end, *marks), node(names.start + names.role))
        thinking = seq(node(f"{names.channel}analysis{names.message}"), message)
        if self.wanted.mode == "required":
            return seq(Repeat(thinking, 0, None), self._messages())
        preamble = seq(node(f"{names.channel}commentary{names.message}"), message)
        header: Node = node(f"{names.channel}final")
        if self.wanted.form is None:
            excluded = [self.speller.mark(each) for each in (names.end, *marks)]
            kind = type(excluded[0])
            text: Node = FreeText(excludes=tuple(key(each) for each in excluded if type(each) is kind))
        else:
            text = self.form(self.wanted.form)
            header = seq(header, optional(self._of_json()))
        final = seq(header, node(names.message), text)
        return seq(Repeat(alt((thinking, preamble)), 0, None), alt((self._messages(), final)))

    def _of_json(self) -> Node:
        """The part of a header that says that the message is JSON."""
        node, names = self.speller.node, HARMONY
        return alt((node(f" {names.constrain}json"), node(" json"), node(f"{names.constrain}json")))

    def _messages(self) -> Node:
        """A call, with the recipient in either place of the header."""
        node, names = self.speller.node, HARMONY
        after = node(f" to={names.namespace}")
        calls: list[Node] = []
        for tool, arguments in zip(self.wanted.tools, self.arguments, strict=True):
            body = seq(
                self._of_json(), node(names.message), arguments, EMPTY if self._ends_itself else node(names.call)
            )
            first = seq(node(f"{names.channel}commentary"), after, Terminal(tool.name))
            last = seq(after, Terminal(tool.name), node(f"{names.channel}commentary"))
            calls.append(seq(alt((first, last)), self.rule(f"body_{len(calls)}", body)))
        return alt(calls)


def _closed(schema: Any) -> Any:
    """The schema of a tool's arguments. One that names no property at all is that of no arguments."""
    if schema is None or schema == {}:
        return {"type": "object", "additionalProperties": False}
    if isinstance(schema, dict) and schema.get("properties") == {}:
        others = [word for word in _ABOUT_PROPERTIES if word in schema and word not in ("properties", "required")]
        return schema if others else {**schema, "additionalProperties": False}
    return schema
