"""Grammars as the text that llguidance compiles: its dialect of Lark.

llguidance parses by lexemes: regular pieces, each as long as possible. So every regular part of a grammar becomes one
terminal, with its intersections and complements, and the rest becomes rules. This is right for JSON: no value is the
beginning of another that could go on where the first one ends.
"""

import json
import re
from collections.abc import Iterable, Iterator

from worker.structured_output.ebnf import (
    Alt,
    Complement,
    Intersection,
    Node,
    Ref,
    Regex,
    Repeat,
    Seq,
    Terminal,
    UniqueItems,
)
from worker.structured_output.error import GrammarError

# Without `no_forcing`, a mask would admit forced text in its canonical tokens only.
_HEAD = '%llguidance {"no_forcing": true}\n'
_SOME = "/(?s:.+)/"


def needs_lark(rules: dict[str, Node]) -> bool:
    """Whether a grammar has what only llguidance can follow."""
    todo: list[Node] = list(rules.values())
    while todo:
        node = todo.pop()
        if isinstance(node, Intersection | Complement | UniqueItems):
            return True
        todo += _children(node)
    return False


def has_unique_items(rules: dict[str, Node]) -> bool:
    """Whether a grammar has arrays of unique items, which the engine alone cannot follow."""
    return any(isinstance(each, UniqueItems) for node in rules.values() for each in _nodes(node))


def to_lark(rules: dict[str, Node], start: str) -> str:
    """The grammar in llguidance's Lark. Raises GrammarError if it has a token by its id, or free text."""
    writer = _LarkWriter()
    lines = [f"start: {writer.expression(Ref(start))}"] if start != "start" else []
    lines += [f"{name}: {writer.expression(node)}" for name, node in rules.items()]
    lines += [f"{name}: {expression}" for expression, name in writer.terminals.items()]
    return _HEAD + "\n".join(lines) + "\n"


class _LarkWriter:
    def __init__(self) -> None:
        self.terminals: dict[str, str] = {}  # expression: its name

    def expression(self, node: Node) -> str:
        """The text of a node, as a part of a rule."""
        if node == Terminal("") or node == Seq(()):
            return '""'
        if _is_regular(node):
            written = _regular(node)
            if not _may_be_empty(node):
                return self._terminal(written)
            if isinstance(node, Regex | Intersection | Complement):
                return f"({self._terminal(f'({written}) & {_SOME}')})?"
        match node:
            case Ref(name):
                return name
            case Seq(parts):
                return "(" + " ".join(map(self.expression, parts)) + ")"
            case Alt(choices):
                return "(" + " | ".join(map(self.expression, choices)) + ")"
            case Repeat(part, least, most):
                return f"({self.expression(part)}){_times(least, most)}"
            case UniqueItems(part, _):
                return self.expression(part)
        raise GrammarError("the grammar has tokens by their ids, which its engine cannot follow")

    def _terminal(self, expression: str) -> str:
        return self.terminals.setdefault(expression, f"T{len(self.terminals)}")


def _regular(node: Node) -> str:
    """The text of a regular node, as a part of a terminal."""
    match node:
        case Terminal(text):
            return json.dumps(text, ensure_ascii=False)
        case Regex(_, (whole, texts)):
            return f"({_pattern(whole)} & ~({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}))"
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


def _nodes(node: Node) -> Iterator[Node]:
    todo = [node]
    while todo:
        each = todo.pop()
        yield each
        todo += _children(each)


def _is_regular(node: Node) -> bool:
    regular = Terminal | Regex | Seq | Alt | Repeat | Intersection | Complement
    return all(isinstance(each, regular) and each != Alt(()) for each in _nodes(node))


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
