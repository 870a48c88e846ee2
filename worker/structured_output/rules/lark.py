"""Grammars as the text that llguidance compiles: its dialect of Lark.

llguidance parses by lexemes: regular pieces, each as long as possible. So every regular part of a grammar becomes one
terminal, with its intersections and complements, and the rest becomes rules. This is right for JSON: no value is the
beginning of another that could go on where the first one ends. Free text is not so, and goes on up to a marker: it is
one terminal together with the marker after it, unless that is a token by its id, which ends any lexeme.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator

from worker.structured_output.rules.ebnf import (
    Alt,
    Complement,
    FreeText,
    Intersection,
    Node,
    Ref,
    Regex,
    Repeat,
    Seq,
    Terminal,
    Token,
    UniqueItems,
)
from worker.structured_output.tokens import APART

# Without `no_forcing`, a mask would admit forced text in its canonical tokens only.
_HEAD = '%llguidance {"no_forcing": true}\n'
_SOME = "/(?s:.+)/"
_ANY = "/(?s:.*)/"
# Characters of a string that one lexeme counts: its automaton has several states for each of them.
_BLOCK = 512


def needs_lark(rules: dict[str, Node]) -> bool:
    """Whether a grammar has what only llguidance can follow."""
    todo: list[Node] = list(rules.values())
    while todo:
        node = todo.pop()
        if isinstance(node, Intersection | Complement | UniqueItems):
            return True
        todo += _children(node)
    return False


def can_follow_markers(rules: dict[str, Node], apart: Collection[int]) -> bool:
    """Whether llguidance can follow the tokens by their ids in a grammar: those that stand for no text."""
    found = [each for rule in rules.values() for each in nodes(rule)]
    ids = {each.id for each in found if isinstance(each, Token)}
    for each in found:
        if isinstance(each, FreeText):
            ids |= {mark for mark in (*each.excludes, *(mark for mark, _ in each.triggers)) if isinstance(mark, int)}
    return ids <= set(apart)


def unique_items(rules: dict[str, Node]) -> UniqueItems | None:
    """An array of unique items, which the engine alone cannot follow, if a grammar has any."""
    found = (each for node in rules.values() for each in nodes(node) if isinstance(each, UniqueItems))
    return next(found, None)


def to_lark(rules: dict[str, Node], start: str) -> str:
    """The grammar in llguidance's Lark. Its tokens by their ids stand for no text."""
    writer = _LarkWriter(rules)
    lines = [f"start: {writer.expression(Ref(start))}"] if start != "start" else []
    lines += [f"{name}: {writer.expression(node)}" for name, node in rules.items()]
    lines += [f"{name}: {expression}" for expression, name in writer.terminals.items()]
    return _HEAD + "\n".join(lines) + "\n"


class _LarkWriter:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._texts = {name: node for name, node in rules.items() if isinstance(node, FreeText) and not node.triggers}
        self.terminals: dict[str, str] = {}  # expression: its name

    def expression(self, node: Node) -> str:
        """The text of a node, as a part of a rule."""
        if node == Terminal("") or node == Seq(()):
            return '""'
        node = self._with_texts(node) if self._texts else node
        if _is_regular(node):
            written = _regular(node)
            if not _may_be_empty(node):
                return self._terminal(written)
            if isinstance(node, Regex | Intersection | Complement | FreeText):
                return f"({self._terminal(f'({written}) & {_SOME}')})?"
        match node:
            case Ref(name):
                return name
            case Token(token_id):
                return f"<[{token_id}]>"
            case Seq(parts):
                return "(" + " ".join(map(self.expression, parts)) + ")"
            case Alt(choices):
                return "(" + " | ".join(map(self.expression, choices)) + ")"
            case Repeat(Regex(pattern), least, most) if _is_long(node):
                return self._in_blocks(pattern, least, most)
            case Repeat(part, least, most):
                return f"({self.expression(part)}){_times(least, most)}"
            case UniqueItems(part, _):
                return self.expression(part)
            case FreeText(triggers, _, loops):
                return self._with_calls(node, triggers, loops=loops)
        raise ValueError(f"{node} is not part of a rule")

    def _with_texts(self, node: Node) -> Node:
        """The node with free texts in place of references to them."""
        match node:
            case Ref(name):
                return self._texts.get(name, node)
            case Seq(parts):
                return Seq(tuple(map(self._with_texts, parts)))
            case Alt(choices):
                return Alt(tuple(map(self._with_texts, choices)))
        return node

    def _with_calls(self, text: FreeText, triggers: tuple[tuple[str | int, str], ...], *, loops: bool) -> str:
        rest = self.expression(FreeText(excludes=(*text.excludes, *(mark for mark, _ in triggers))))
        calls = []
        for mark, name in triggers:
            if isinstance(mark, int):
                calls.append(f"{rest} <[{mark}]> {name}")
            else:
                calls.append(f"{self._terminal(f'({_regular(text)} {json.dumps(mark, ensure_ascii=False)})')} {name}")
        return f"({' | '.join(calls)})* {rest}" if loops else f"({' | '.join([*calls, rest])})"

    def _in_blocks(self, pattern: str, least: int, most: int | None) -> str:
        """`pattern` from `least` to `most` times, in blocks that are lexemes."""

        def rest(low: int, high: int) -> str:
            some = self._terminal(f"{_pattern(pattern)}{{{max(1, low)},{high}}}") if high else '""'
            return some if low or not high else f"({some})?"

        block = self._terminal(f"{_pattern(pattern)}{{{_BLOCK}}}")

        def blocks(low: int, high: int | None) -> str:
            return f"({block}){_times(low, high)}" if high != 0 else '""'

        first, low = divmod(least, _BLOCK)
        last, high = (None, 0) if most is None else divmod(most, _BLOCK)
        if first == last:
            return f"({blocks(first, first)} {rest(low, high)})"
        choices = [f"{blocks(first, first)} {rest(low, _BLOCK - 1)}"]
        if last is None or first + 1 < last:
            choices.append(f"{blocks(first + 1, None if last is None else last - 1)} {rest(0, _BLOCK - 1)}")
        if last is not None:
            choices.append(f"{blocks(last, last)} {rest(0, high)}")
        return f"({' | '.join(choices)})"

    def _terminal(self, expression: str) -> str:
        return self.terminals.setdefault(expression, f"T{len(self.terminals)}")


def _regular(node: Node) -> str:
    """The text of a regular node, as a part of a terminal."""
    match node:
        case Terminal(text):
            return json.dumps(text, ensure_ascii=False)
        case Regex(_, (whole, others)):
            return f"({_pattern(whole)} & ~({' | '.join(map(_pattern, others))}))"
        case Regex(pattern):
            return _pattern(pattern)
        case Seq(parts):
            return "(" + " ".join(map(_regular, parts)) + ")"
        case Alt(choices):
            return "(" + " | ".join(map(_regular, choices)) + ")"
        case Repeat(part, least, most):
            return f"({_regular(part)}){_times(least, most)}"
        case Intersection(parts, _):
            return "(" + " & ".join(f"({_regular(part)})" for part in parts) + ")"
        case Complement(part):
            return f"(~({_regular(part)}))"
        case FreeText(triggers, excludes):
            marks = [mark for mark in (*excludes, *(each for each, _ in triggers)) if isinstance(mark, str)]
            found = " | ".join(json.dumps(mark, ensure_ascii=False) for mark in marks if mark != APART)
            return f"({_ANY} & ~({_ANY} ({found}) {_ANY}))" if found else _ANY
    raise ValueError(f"{node} is not regular")


def _pattern(pattern: str) -> str:
    """A pattern between slashes. xgrammar's notation and that of llguidance agree but for the slash and for characters
    that a line of Lark cannot have."""
    out, escaped = "", False
    for char in pattern:
        if ord(char) < 0x20 or ord(char) == 0x7F:
            out += f"x{ord(char):02x}" if escaped else f"\\x{ord(char):02x}"
        elif char == "/" and not escaped:
            out += "\\/"
        else:
            out += char
        escaped = char == "\\" and not escaped
    return f"/{out}/"


def _times(least: int, most: int | None) -> str:
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return f"{{{least},{most}}}"


def _children(node: Node) -> Iterable[Node]:
    match node:
        case Seq(parts) | Alt(parts):
            return parts
        case Intersection(parts, _):
            return parts
        case Repeat(part, _, _) | Complement(part) | UniqueItems(part, _):
            return (part,)
    return ()


def nodes(node: Node) -> Iterator[Node]:
    """The node and all within it."""
    todo = [node]
    while todo:
        each = todo.pop()
        yield each
        todo += _children(each)


def _is_regular(node: Node) -> bool:
    if isinstance(node, FreeText):
        return not node.triggers
    if isinstance(node, Seq | Alt):
        return node != Alt(()) and all(map(_is_regular, _children(node)))
    return isinstance(node, Terminal | Regex | Intersection | Complement) or (
        isinstance(node, Repeat) and not _is_long(node) and _is_regular(node.part)
    )


def _is_long(node: Repeat) -> bool:
    """Whether a repetition, outside of an intersection, is written in blocks."""
    return isinstance(node.part, Regex) and max(node.least, node.most or 0) > _BLOCK


def _may_be_empty(node: Node) -> bool:
    """Whether a regular node may match the empty text."""
    match node:
        case Terminal(text):
            return not text
        case Regex(pattern):
            return re.fullmatch(pattern, "") is not None
        case Intersection(parts, _):
            return all(map(_may_be_empty, parts))
        case Seq(parts):
            return all(map(_may_be_empty, parts))
        case Alt(choices):
            return any(map(_may_be_empty, choices))
        case Repeat(part, least, _):
            return least == 0 or _may_be_empty(part)
    return True
