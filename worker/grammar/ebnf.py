"""Grammars as trees, and as the text that xgrammar compiles.

A regular piece (`Regex`) becomes one automaton, so no token straddles two rules inside it: that is what keeps the mask
of allowed tokens cheap. Measured with SmolLM2's 49,152 tokens: a string as one `Regex` costs 0.02 ms a token, the same
string as a rule of rules 20 ms, and with a bounded repetition around that 800 ms.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Regex:
    """A pattern in xgrammar's notation, as `worker.grammar.regex` writes it. Never empty of matches."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Chars:
    """`least` to `most` (None: any number) characters of these ranges of code points. Where `most` is large this is
    cheaper than a `Regex`, which has a state for every character counted."""

    ranges: tuple[tuple[int, int], ...]
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """Whatever the rule of this name matches."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Any one of these; none at all matches nothing."""

    choices: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` (None: any number) times."""

    part: "Node"
    least: int
    most: int | None


Node = Text | Regex | Chars | Ref | Seq | Alt | Repeat

NEVER = Alt(())
EMPTY = Text("")


def seq(*parts: Node) -> Node:
    return Seq(parts)


def alt(choices: Iterable[Node]) -> Node:
    return Alt(tuple(dict.fromkeys(choices)))


def optional(part: Node) -> Node:
    return Alt((part, EMPTY))


def prune(rules: dict[str, Node], root: str) -> dict[str, Node] | None:
    """The rules without what can never be completed and what is never reached, or None if `root` matches nothing.

    A model that entered a branch which has no end would find no token allowed.
    """
    finite = _productive(rules)
    if root not in finite:
        return None
    kept: dict[str, Node] = {}
    todo = [root]
    while todo:
        name = todo.pop()
        if name not in kept:
            kept[name] = _prune(rules[name], finite)
            todo += [ref for ref in _refs(kept[name]) if ref not in kept]
    return kept


def _productive(rules: dict[str, Node]) -> set[str]:
    """The names of the rules that match something finite."""
    users: dict[str, list[str]] = {}
    for name, node in rules.items():
        for ref in _refs(node):
            users.setdefault(ref, []).append(name)
    finite: set[str] = set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in finite and _matches(rules[name], finite):
            finite.add(name)
            todo += users.get(name, [])
    return finite


def _matches(node: Node, finite: set[str]) -> bool:
    match node:
        case Ref(name):
            return name in finite
        case Seq(parts):
            return all(_matches(part, finite) for part in parts)
        case Alt(choices):
            return any(_matches(choice, finite) for choice in choices)
        case Repeat(part, least, _):
            return least == 0 or _matches(part, finite)
    return True


def _prune(node: Node, finite: set[str]) -> Node:
    match node:
        case Seq(parts):
            return Seq(tuple(_prune(part, finite) for part in parts))
        case Alt(choices):
            kept = tuple(_prune(choice, finite) for choice in choices if _matches(choice, finite))
            return kept[0] if len(kept) == 1 else Alt(kept)
        case Repeat(part, least, most):
            return Repeat(_prune(part, finite), least, most) if _matches(part, finite) else EMPTY
    return node


def _refs(node: Node) -> Iterator[str]:
    match node:
        case Ref(name):
            yield name
        case Seq(parts) | Alt(parts):
            for part in parts:
                yield from _refs(part)
        case Repeat(part, _, _):
            yield from _refs(part)


# ---------------------------------------------------------------- text


def to_text(rules: dict[str, Node], root: str) -> str:
    """The grammar in xgrammar's EBNF; its first rule is called root."""
    lines = [f"root ::= {_expression(Ref(root))}"]
    lines += [f"{name} ::= {_expression(node)}" for name, node in rules.items()]
    return "\n".join(lines) + "\n"


def _expression(node: Node) -> str:
    match node:
        case Text(text):
            return quote(text)
        case Regex(pattern):
            return f"Regex({quote(pattern)})"
        case Chars(ranges, least, most):
            return f"[{''.join(_range(first, last) for first, last in ranges)}]{_bounds(least, most)}"
        case Ref(name):
            return name
        case Seq(parts):
            return "(" + " ".join(_expression(part) for part in parts) + ")" if parts else '""'
        case Alt(choices):
            return "(" + " | ".join(_expression(choice) for choice in choices) + ")"
        case Repeat(part, least, most):
            return f"({_expression(part)}){_bounds(least, most)}"


def _bounds(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _range(first: int, last: int) -> str:
    return f"{_escape(first)}-{_escape(last)}"


def quote(text: str) -> str:
    """A string literal of the notation."""
    return '"' + "".join(c if _is_plain(c) else _escape(ord(c)) for c in text) + '"'


def _is_plain(char: str) -> bool:
    return " " <= char <= "~" and char not in '"\\'


def _escape(codepoint: int) -> str:
    return f"\\u{codepoint:04x}" if codepoint < 0x10000 else f"\\U{codepoint:08x}"
