"""Grammars as trees, and as the text that xgrammar compiles.

A regular piece (`Regex`) becomes one automaton, so no token straddles two rules inside it: that is what keeps the mask
of allowed tokens cheap. Measured with SmolLM2's 49,152 tokens: a string as one `Regex` costs 0.02 ms a token, the same
string as a rule of rules 20 ms, and with a bounded repetition around that 800 ms.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

_UNROLLED = 128


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Regex:
    """A pattern in xgrammar's notation, as `worker.grammar.regex` writes it. Never empty of matches."""

    pattern: str


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
    """`least` to `most` (None: any number) times. For many times of a `Regex` this is cheaper than to count in the
    pattern, which has a state for every one."""

    part: "Node"
    least: int
    most: int | None


Node = Text | Regex | Ref | Seq | Alt | Repeat

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
    writer = _Writer()
    lines = [f"root ::= {root}"]
    lines += [f"{name} ::= {writer.expression(node)}" for name, node in rules.items()]
    lines += [f"{name} ::= {expression}" for expression, name in writer.counted.items()]
    return "\n".join(lines) + "\n"


Piece = Callable[[int, int | None], str]


class _Writer:
    def __init__(self) -> None:
        self.counted: dict[str, str] = {}  # expression: its rule's name

    def expression(self, node: Node) -> str:
        match node:
            case Text(text):
                return quote(text)
            case Regex(pattern):
                return f"Regex({quote(pattern)})"
            case Ref(name):
                return name
            case Seq(parts):
                return "(" + " ".join(self.expression(part) for part in parts) + ")" if parts else '""'
            case Alt(choices):
                return "(" + " | ".join(self.expression(choice) for choice in choices) + ")"
            case Repeat(Regex(pattern), least, most):
                return self._times(lambda n, m: f"Regex({quote(f'(?:{pattern}){_bounds(n, m)}')})", least, most)
            case Repeat(part, least, most):
                inner = self.expression(part)
                return self._times(lambda n, m: f"({inner}){_bounds(n, m)}", least, most)

    def _times(self, piece: Piece, least: int, most: int | None) -> str:
        """`piece(n, m)`, what repeats from n to m times, in pieces that xgrammar unrolls. Beyond 128 it counts at run
        time instead, and its cached masks are then wrong: they admit tokens that it does not accept."""
        if least:
            whole, rest = divmod(least, _UNROLLED)
            parts = [self._wholes(piece, whole, whole)] if whole else []
            parts += [piece(rest, rest)] if rest else []
            if most is None:
                parts.append(piece(0, None))
            elif most > least:
                parts.append(self._up_to(piece, most - least))
            return f"({' '.join(parts)})"
        return piece(0, None) if most is None else self._up_to(piece, most)

    def _up_to(self, piece: Piece, most: int) -> str:
        if most <= _UNROLLED:
            return piece(0, most)
        whole = (most - 1) // _UNROLLED
        rest = most - whole * _UNROLLED
        # Fewer than the odd rest; or the rest, some whole pieces, and less than another.
        wholes = self._wholes(piece, 0, whole - 1) + " " if whole > 1 else ""
        return f"({piece(0, rest - 1)} | {piece(rest, rest)} {wholes}{piece(0, _UNROLLED)})"

    def _wholes(self, piece: Piece, least: int, most: int) -> str:
        name = self.counted.setdefault(piece(_UNROLLED, _UNROLLED), f"n{len(self.counted)}")
        return self._times(lambda n, m: f"{name}{_bounds(n, m)}", least, most)


def _bounds(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def quote(text: str) -> str:
    """A string literal of the notation."""
    return '"' + "".join(c if _is_plain(c) else _escape(ord(c)) for c in text) + '"'


def _is_plain(char: str) -> bool:
    return " " <= char <= "~" and char not in '"\\'


def _escape(codepoint: int) -> str:
    return f"\\u{codepoint:04x}" if codepoint < 0x10000 else f"\\U{codepoint:08x}"
