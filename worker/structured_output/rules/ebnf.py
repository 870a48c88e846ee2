"""Grammars as trees, and as the text that xgrammar compiles.

A regular piece (`Regex`) becomes one automaton. No token spans two rules inside it, which keeps the mask of allowed
tokens cheap. Cost per token inside a string, measured with SmolLM2's vocabulary of 49,152:

| the string is | cost |
| --- | --- |
| one `Regex` | 0.02 ms |
| a rule of rules | 20 ms |
| a rule of rules with a bounded repetition around it | 800 ms |
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from worker.structured_output.error import GrammarError
from worker.structured_output.rules import regex

START = "start"  # the rule that a grammar begins with
# Beyond this number of repetitions xgrammar counts at run time instead. Its cached masks are then wrong: they admit
# tokens that it does not accept.
_MAX_UNROLLED = 128
_LARGE_COUNT = re.compile(r"\d{3}")


@dataclass(frozen=True, slots=True)
class Terminal:
    """Matches exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Regex:
    """A pattern in xgrammar's notation, as `regex.py` writes it. At least one text matches it.

    `difference`: a wider pattern and patterns of the texts of it that do not match. Where llguidance sees a pattern
    like this, it need not try every token of the vocabulary: a mask in an object's key takes 20 us instead of 1.1 ms
    (128,256 tokens, 10 named properties).
    """

    pattern: str
    difference: tuple[str, tuple[str, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Ref:
    """Matches what the rule of this name matches."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """Matches the parts one after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Matches any one of the choices. Without choices it matches nothing."""

    choices: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Matches `part` from `least` to `most` (None: any number) times. For many repetitions of a `Regex` this is cheaper
    than a count in the pattern, which has a state for each repetition."""

    part: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Token:
    """Matches the token with this id, and no other that has the same text."""

    id: int


@dataclass(frozen=True, slots=True)
class FreeText:
    """Matches any text, or any tokens, in which none of `excludes` occurs. The rule of a trigger must follow it; after
    that the text goes on if `loops`. Triggers and excludes are either all texts or all token ids."""

    triggers: tuple[tuple[str | int, str], ...] = ()
    excludes: tuple[str | int, ...] = ()
    loops: bool = True


@dataclass(frozen=True, slots=True)
class Intersection:
    """Matches what every part matches. The parts are regular: no `Ref`, `Token` or `FreeText` is in them. At least one
    text matches. xgrammar has nothing like it. `what`: keywords and their place, for the message where xgrammar must
    follow the grammar."""

    parts: tuple["Node", ...]
    what: str


@dataclass(frozen=True, slots=True)
class Complement:
    """Matches what the part does not match, which is regular. Stands inside of an `Intersection`."""

    part: "Node"


@dataclass(frozen=True, slots=True)
class UniqueItems:
    """Matches the arrays of `part` whose items all differ, which no grammar can say: `unique_items.py` does. `what`: as
    `Intersection` has it."""

    part: "Node"
    what: str


Node = Terminal | Regex | Ref | Seq | Alt | Repeat | Token | FreeText | Intersection | Complement | UniqueItems

NEVER = Alt(())
EMPTY = Terminal("")


def seq(*parts: Node) -> Node:
    return Seq(parts)


def alt(choices: Iterable[Node]) -> Node:
    return Alt(tuple(dict.fromkeys(choices)))


def optional(part: Node) -> Node:
    return Alt((part, EMPTY))


def prune(rules: dict[str, Node], root: str) -> dict[str, Node] | None:
    """The rules without branches that can never be completed and rules that are never reached. None if `root` matches
    nothing.

    A model that entered a branch without an end would find no token allowed.
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


def without_dead_ends(node: Node) -> Node:
    """A regular node without branches that can never be completed. NEVER if it matches nothing."""
    return _prune(node, set()) if _matches(node, set()) else NEVER


def dead_end(rules: dict[str, Node], root: str) -> list[str]:
    """The rules on a way from `root`, which matches nothing, to one that matches nothing by itself or needs itself."""
    finite, way = _productive(rules), [root]
    while True:
        dead = [name for name in _refs(rules[way[-1]]) if name not in finite and name not in way]
        if not dead:
            return way
        way.append(dead[0])


def _productive(rules: dict[str, Node]) -> set[str]:
    """The names of the rules that match at least one finite text."""
    users: dict[str, set[str]] = {}
    for name, node in rules.items():
        for ref in _refs(node):
            users.setdefault(ref, set()).add(name)
    finite: set[str] = set()
    due = dict.fromkeys(rules)  # in order; a rule that several others make due is looked at once
    while due:
        name = next(iter(due))
        del due[name]
        if _matches(rules[name], finite):
            finite.add(name)
            due.update((user, None) for user in users.get(name, ()) if user not in finite)
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
        case FreeText(triggers):
            return all(name in finite for _, name in triggers)
        case UniqueItems(part, _):
            return _matches(part, finite)
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
        case UniqueItems(part, what):
            return UniqueItems(_prune(part, finite), what)
    return node


def _refs(node: Node) -> Iterator[str]:
    match node:
        case Ref(name):
            yield name
        case Seq(parts) | Alt(parts):
            for part in parts:
                yield from _refs(part)
        case Repeat(part, _, _) | UniqueItems(part, _):
            yield from _refs(part)
        case FreeText(triggers):
            yield from (name for _, name in triggers)


def prefixed(rules: dict[str, Node], prefix: str) -> dict[str, Node]:
    """The rules under names with a prefix, so that they can stand next to others."""

    def renamed(node: Node) -> Node:
        match node:
            case Ref(name):
                return Ref(prefix + name)
            case Seq(parts):
                return Seq(tuple(map(renamed, parts)))
            case Alt(choices):
                return Alt(tuple(map(renamed, choices)))
            case Repeat(part, least, most):
                return Repeat(renamed(part), least, most)
            case UniqueItems(part, what):
                return UniqueItems(renamed(part), what)
            case FreeText(triggers):
                return replace(node, triggers=tuple((mark, prefix + name) for mark, name in triggers))
        return node

    return {prefix + name: renamed(node) for name, node in rules.items()}


# ---------------------------------------------------------------- text


def to_text(rules: dict[str, Node], root: str) -> str:
    """The grammar in xgrammar's EBNF. Its first rule is called root. Raises GrammarError for intersections."""
    writer = _Writer()
    lines = [f"root ::= {root}"]
    lines += [f"{name} ::= {writer.expression(node)}" for name, node in rules.items()]
    lines += [f"{name} ::= {expression}" for expression, name in writer.counted.items()]
    return "\n".join(lines) + "\n"


def rule_text(name: str, node: Node) -> str:
    """A rule in xgrammar's EBNF. It has no repetition of more than 128 times."""
    return f"{name} ::= {_Writer().expression(node)}"


Piece = Callable[[int, int | None], str]


class _Writer:
    def __init__(self) -> None:
        self.counted: dict[str, str] = {}  # expression: its rule's name

    def expression(self, node: Node) -> str:
        match node:
            case Terminal(text):
                return quote(text)
            case Regex(pattern):
                if _LARGE_COUNT.search(pattern) and regex.counted(pattern)[1] > _MAX_UNROLLED:
                    raise GrammarError(
                        f"more than {_MAX_UNROLLED} characters are not counted in a grammar of this kind"
                    )
                return f"Regex({quote(pattern)})"
            case Ref(name):
                return name
            case Token(token_id):
                return f"Token({token_id})"
            case FreeText():
                return _free_text(node)
            case Seq(parts):
                return "(" + " ".join(self.expression(part) for part in parts) + ")" if parts else '""'
            case Alt(choices):
                return "(" + " | ".join(self.expression(choice) for choice in choices) + ")"
            case Repeat(Regex(pattern), least, most):
                return self._times(lambda n, m: f"Regex({quote(f'(?:{pattern}){_bounds(n, m)}')})", least, most)
            case Repeat(part, least, most):
                inner = self.expression(part)
                return self._times(lambda n, m: f"({inner}){_bounds(n, m)}", least, most)
            case Intersection(_, what) | UniqueItems(_, what):
                raise GrammarError(f"{what}: not supported in a grammar of this kind")
            case Complement():
                raise ValueError("a complement outside of an intersection")

    def _times(self, piece: Piece, least: int, most: int | None) -> str:
        """Repetition from `least` to `most` times, in pieces that xgrammar unrolls. `piece(n, m)`: n to m times."""
        if least:
            whole, rest = divmod(least, _MAX_UNROLLED)
            parts = [self._wholes(piece, whole, whole)] if whole else []
            parts += [piece(rest, rest)] if rest else []
            if most is None:
                parts.append(piece(0, None))
            elif most > least:
                parts.append(self._up_to(piece, most - least))
            return f"({' '.join(parts)})"
        return piece(0, None) if most is None else self._up_to(piece, most)

    def _up_to(self, piece: Piece, most: int) -> str:
        if most <= _MAX_UNROLLED:
            return piece(0, most)
        whole = (most - 1) // _MAX_UNROLLED
        rest = most - whole * _MAX_UNROLLED
        # Either fewer than `rest`; or `rest`, some whole pieces, and up to one more piece.
        wholes = self._wholes(piece, 0, whole - 1) + " " if whole > 1 else ""
        return f"({piece(0, rest - 1)} | {piece(rest, rest)} {wholes}{piece(0, _MAX_UNROLLED)})"

    def _wholes(self, piece: Piece, least: int, most: int) -> str:
        name = self.counted.setdefault(piece(_MAX_UNROLLED, _MAX_UNROLLED), f"n{len(self.counted)}")
        return self._times(lambda n, m: f"{name}{_bounds(n, m)}", least, most)


def _free_text(node: FreeText) -> str:
    of_tokens = any(isinstance(mark, int) for mark in (*node.excludes, *(mark for mark, _ in node.triggers)))
    parts = [f"({_mark(mark)}, {name})" for mark, name in node.triggers]
    parts += [] if node.loops else ["loop_after_dispatch=false"]
    if node.excludes:
        parts.append(f"excludes=({''.join(_mark(mark) + ',' for mark in node.excludes)})")
    return f"{'TokenTagDispatch' if of_tokens else 'TagDispatch'}({', '.join(parts)})"


def _mark(mark: str | int) -> str:
    return str(mark) if isinstance(mark, int) else quote(mark)


def _bounds(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def quote(text: str) -> str:
    """`text` as a string literal of the notation."""
    return '"' + "".join(c if _is_plain(c) else _escape(ord(c)) for c in text) + '"'


def _is_plain(char: str) -> bool:
    return " " <= char <= "~" and char not in '"\\'


def _escape(codepoint: int) -> str:
    return f"\\u{codepoint:04x}" if codepoint < 0x10000 else f"\\U{codepoint:08x}"
