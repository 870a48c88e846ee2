"""The engine that follows a grammar: the choice between xgrammar and llguidance.

| | xgrammar | llguidance |
| --- | --- | --- |
| compiles | the masks of all states: from 10 ms to minutes | nothing: automata grow as outputs follow them |
| a mask | copied from those, 1 to 10 us | computed, 10 to 100 us; some of the first ones milliseconds |
| follows | our EBNF | our Lark: also intersections and complements |
| a string that counts its characters | compiles for each count: 40 characters take 0.5 s | as cheap as any other |

Both follow the same rules, which `schema.py` and `regex.py` make. So neither the choice nor the machine decides which
outputs are valid.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from worker.structured_output.json_schema.unique_places import Place
from worker.structured_output.rules.ebnf import START, Node, Regex, Repeat, to_text
from worker.structured_output.rules.lark import needs_lark, nodes
from worker.structured_output.rules.regex import counted

XGRAMMAR, LLGUIDANCE = "xgrammar", "llguidance"

# xgrammar is tried where the number of rules, times the length of their text, stays below this: its serialisation has a
# copy of the whole automaton for each rule. Of 13 published schemas, those below took it up to 22 ms, and those above
# 40 ms to 1.5 s; llguidance took 6 to 36 ms.
_MAX_COPIED_CHARS = 30_000
# Characters and sets of characters in all patterns of a grammar, counted ones as often as they are counted. Compiling
# takes xgrammar about 0.2 ms for each in patterns that count; others are cheap.
_MAX_UNROLLED_CHARS = 200
# What xgrammar may take before llguidance follows the grammar instead.
XGRAMMAR_CPU_S = 0.25
XGRAMMAR_BYTES = 256 << 20

_COUNT = re.compile(r"\{\d*[2-9]\d*,|,\d*[2-9]\d*\}|\d\d,|,\d\d")


class CompiledText(NamedTuple):
    """A compiled grammar, as one process sends it to another.

    | field | meaning |
    | --- | --- |
    | `engine` | `XGRAMMAR` or `LLGUIDANCE` |
    | `text` | xgrammar's serialisation, or the grammar in llguidance's Lark |
    | `places` | places of unique items in the values of the grammar, as `unique_places` returns them |
    | `cpu_s` | CPU time that the grammar has taken, with attempts that led nowhere |
    | `not_enforced` | keywords of the schema, with their places, that the grammar leaves out |
    | `narrowed` | those of which the grammar does not have all values |
    """

    engine: str
    text: str
    cpu_s: float
    places: Sequence[Place] = ()
    not_enforced: Sequence[str] = ()
    narrowed: Sequence[str] = ()


def engine_for(rules: dict[str, Node]) -> tuple[str, ...]:
    """The engines to try, in this order: the next one if one takes too much."""
    if needs_llguidance(rules) or len(rules) * len(to_text(rules, START)) > _MAX_COPIED_CHARS:
        return (LLGUIDANCE,)
    return XGRAMMAR, LLGUIDANCE


def needs_llguidance(rules: dict[str, Node]) -> bool:
    """Whether xgrammar cannot follow the rules, or has too much to count."""
    return needs_lark(rules) or _unrolled(rules) > _MAX_UNROLLED_CHARS


def _unrolled(rules: dict[str, Node]) -> int:
    found = 0
    for rule in rules.values():
        for node in nodes(rule):
            if isinstance(node, Repeat) and isinstance(node.part, Regex):
                found += (node.most or node.least) * counted(node.part.pattern)[0]
            elif isinstance(node, Regex) and _COUNT.search(node.pattern):
                found += counted(node.pattern)[0]
    return found
