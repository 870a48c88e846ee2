"""Structural tags: text whose parts between marks have forms of their own, in the words of xgrammar's structural tags.

The schemas in them become grammars as any other schema does here, so a part that is whole validates.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from worker.structured_output.conversion.text_rules import text_rules
from worker.structured_output.error import GrammarError
from worker.structured_output.rules.ebnf import (
    EMPTY,
    START,
    FreeText,
    Node,
    Ref,
    Repeat,
    alt,
    optional,
    prefixed,
    prune,
    seq,
)
from worker.structured_output.tokens import GrammarVocabulary
from worker.structured_output.tool_calls.markers import Speller, key

_MAX_DEPTH = 32
_ANSWER = "answer"


def structural_tag_rules(text: str, vocabulary: GrammarVocabulary) -> tuple[dict[str, Node], str]:
    """The rules of a structural tag, given as JSON: an object with `format`, or with `structures` and `triggers`; and
    the rule to begin with. Special tokens in marks are written as these tokens. Raises GrammarError."""
    try:
        wanted = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"the structural tag is not valid JSON: {error}") from None
    writer = _TagWriter(Speller(vocabulary.special, vocabulary.special))
    rules = {**writer.rules, _ANSWER: writer.format(_modern(wanted), "format", ())}
    kept = prune(rules | writer.rules, _ANSWER)
    if kept is None:
        raise GrammarError("no text satisfies the structural tag")
    return kept, _ANSWER


def _modern(wanted: Any) -> Any:
    """The format of a structural tag. `structures` are its older form: tags with a schema each."""
    if not isinstance(wanted, dict):
        raise GrammarError("the structural tag is not an object")
    if "structures" not in wanted:
        return wanted.get("format")
    tags = [
        {
            "type": "tag",
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
            "end": each.get("end"),
        }
        for each in _list(wanted, "structures", "structural_tag")
        if isinstance(each, dict)
    ]
    return {**wanted, "type": "triggered_tags", "tags": tags}


class _TagWriter:
    """Makes the nodes of formats. `rules` has those that they refer to."""

    def __init__(self, speller: Speller) -> None:
        self.rules: dict[str, Node] = {}
        self._speller = speller

    def format(self, format: Any, at: str, until: Sequence[str], depth: int = 0) -> Node:
        """The node of a format. `at`: its place, for messages. `until`: the marks that end it; free text has none of
        them. Raises GrammarError."""
        if not isinstance(format, dict):
            raise GrammarError(f"{at} is not an object with a type")
        if depth > _MAX_DEPTH:
            raise GrammarError("the structural tag is nested too deeply")
        kind = format.get("type")
        make = self._makers().get(kind) if isinstance(kind, str) else None
        if make is None:
            known = ", ".join(self._makers())
            raise GrammarError(f"{at}.type is {str(kind)[:100]!r}: known are {known}")
        return self._rule(make(format, at, until, depth))

    def _makers(self) -> dict[str, Callable[[dict[str, Any], str, Sequence[str], int], Node]]:
        return {
            "const_string": lambda format, at, until, depth: self._speller.node(_text(format, "value", at)),
            "json_schema": self._schema,
            "regex": self._regex,
            "any_text": lambda format, at, until, depth: FreeText(excludes=self._excludes(format, at, until)),
            "sequence": self._sequence,
            "or": lambda format, at, until, depth: alt(self._elements(format, at, until, depth)),
            "optional": lambda format, at, until, depth: optional(self._content(format, at, until, depth)),
            "star": lambda format, at, until, depth: Repeat(self._content(format, at, until, depth), 0, None),
            "plus": lambda format, at, until, depth: Repeat(self._content(format, at, until, depth), 1, None),
            "tag": lambda format, at, until, depth: self._tag(format, at, _text(format, "begin", at), depth),
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    # ------------------------------------------------------------ contents

    def _schema(self, format: dict[str, Any], at: str, until: Sequence[str], depth: int) -> Node:
        if format.get("style", "json") != "json":
            raise GrammarError(f"{at}.style is {str(format['style'])[:100]!r}: only json is supported")
        if "json_schema" not in format:
            raise GrammarError(f"{at}.json_schema is missing")
        return self._of_text("json_schema", json.dumps(format["json_schema"]), f"{at}.json_schema")

    def _regex(self, format: dict[str, Any], at: str, until: Sequence[str], depth: int) -> Node:
        return self._of_text("regex", _text(format, "pattern", at), f"{at}.pattern")

    def _of_text(self, kind: str, text: str, at: str) -> Node:
        prefix = f"x{len(self.rules)}_"
        try:
            self.rules |= prefixed(text_rules(kind, text), prefix)
        except GrammarError as error:
            raise GrammarError(f"{at}: {error}") from None
        return Ref(prefix + START)

    def _sequence(self, format: dict[str, Any], at: str, until: Sequence[str], depth: int) -> Node:
        elements = _list(format, "elements", at)
        for number, element in enumerate(elements[:-1]):
            if _is_open(element):
                raise GrammarError(f"{at}.elements[{number}] has no end: it must be the last one, or be in a tag")
        return seq(*self._elements(format, at, until, depth))

    def _elements(self, format: dict[str, Any], at: str, until: Sequence[str], depth: int) -> list[Node]:
        elements = _list(format, "elements", at)
        return [self.format(each, f"{at}.elements[{i}]", until, depth + 1) for i, each in enumerate(elements)]

    def _content(self, format: dict[str, Any], at: str, until: Sequence[str], depth: int) -> Node:
        if format["type"] != "optional" and _is_open(format.get("content")):
            raise GrammarError(f"{at}.content has no end, so it cannot come again")
        return self.format(format.get("content"), f"{at}.content", until, depth + 1)

    # ------------------------------------------------------------ tags

    def _tag(self, format: dict[str, Any], at: str, begin: str, depth: int) -> Node:
        """A tag. `begin`: the part of its beginning that is still to come."""
        ends = format.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise GrammarError(f"{at}.end is neither a text nor a list of some")
        marks = [end for end in ends if end]
        if not marks and _is_open(format.get("content")):
            raise GrammarError(f"{at}.end is empty, and its content has no end of its own")
        content = self.format(format.get("content"), f"{at}.content", marks, depth + 1)
        return seq(self._speller.node(begin), content, alt(self._speller.node(end) for end in ends))

    def _tags(self, format: dict[str, Any], at: str) -> list[tuple[str, dict[str, Any], str]]:
        """The tags of a format, each with its place and its beginning."""
        found = []
        for number, tag in enumerate(_list(format, "tags", at)):
            where = f"{at}.tags[{number}]"
            if not isinstance(tag, dict):
                raise GrammarError(f"{where} is not an object")
            found.append((where, tag, _text(tag, "begin", where)))
        return found

    def _triggered(self, format: dict[str, Any], at: str, until: Sequence[str], depth: int) -> Node:
        triggers = _list(format, "triggers", at)
        if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise GrammarError(f"{at}.triggers is not a list of texts that are not empty")
        by_trigger: dict[str, list[Node]] = {trigger: [] for trigger in triggers}
        whole: list[Node] = []
        for where, tag, begin in self._tags(format, at):
            fitting = [trigger for trigger in by_trigger if begin.startswith(trigger)]
            if len(fitting) != 1:
                raise GrammarError(f"{where}.begin begins with {len(fitting)} of the triggers: it must with one")
            (trigger,) = fitting
            by_trigger[trigger].append(self._tag(tag, where, begin.removeprefix(trigger), depth))
            if format.get("at_least_one"):
                whole.append(self._tag(tag, where, begin, depth))
        used = [
            (self._mark(trigger, at), self._rule(alt(nodes)).name) for trigger, nodes in by_trigger.items() if nodes
        ]
        first = alt(whole) if whole else EMPTY
        if whole and format.get("stop_after_first"):
            return first
        excludes = self._excludes(format, at, until)
        kinds = {type(mark) for mark in (*(mark for mark, _ in used), *excludes)}
        if len(kinds) > 1:
            raise GrammarError(f"{at}: some marks are special tokens and others are not, which is not supported")
        return seq(first, FreeText(tuple(used), excludes, loops=not format.get("stop_after_first")))

    def _separated(self, format: dict[str, Any], at: str, until: Sequence[str], depth: int) -> Node:
        one = self._rule(alt(self._tag(tag, where, begin, depth) for where, tag, begin in self._tags(format, at)))
        more = Repeat(seq(self._speller.node(_text(format, "separator", at)), one), 0, None)
        tags = one if format.get("stop_after_first") else seq(one, more)
        return tags if format.get("at_least_one") else optional(tags)

    # ------------------------------------------------------------ marks

    def _excludes(self, format: dict[str, Any], at: str, until: Sequence[str]) -> tuple[str | int, ...]:
        own = format.get("excludes") or []
        if not isinstance(own, list) or not all(isinstance(each, str) and each for each in own):
            raise GrammarError(f"{at}.excludes is not a list of texts that are not empty")
        return tuple(dict.fromkeys(self._mark(mark, at) for mark in (*until, *own)))

    def _mark(self, text: str, at: str) -> str | int:
        """A mark within free text: a text, or a special token's id."""
        parts = self._speller.parts(text)
        if len(parts) > 1 and not isinstance(key(parts[0]), int):
            raise GrammarError(f"{at}: the mark {text[:100]!r} has a special token that does not begin it")
        return key(parts[0])

    def _rule(self, node: Node) -> Ref:
        name = f"x{len(self.rules)}"
        self.rules[name] = node
        return Ref(name)


def _is_open(format: Any) -> bool:
    """Whether a format goes on until something else ends it."""
    if not isinstance(format, dict):
        return False
    parts = format.get("elements") or [format.get("content")]
    match format.get("type"):
        case "any_text":
            return True
        case "triggered_tags":
            return not (format.get("at_least_one") and format.get("stop_after_first"))
        case "sequence" | "or" | "optional" | "star" | "plus":
            return any(map(_is_open, parts if isinstance(parts, list) else ()))
    return False


def _text(format: dict[str, Any], name: str, at: str) -> str:
    value = format.get(name)
    if not isinstance(value, str):
        raise GrammarError(f"{at}.{name} is not a text")
    return value


def _list(format: dict[str, Any], name: str, at: str) -> list[Any]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{at}.{name} is not a list of one or more")
    return value
