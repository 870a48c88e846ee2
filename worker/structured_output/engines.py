"""The engine that follows a grammar: the choice between xgrammar and llguidance.

| | xgrammar | llguidance |
| --- | --- | --- |
| compiles | the masks of all states: from 10 ms to minutes | nothing: automata grow as outputs follow them |
| a mask | copied from those, 1 to 10 us | computed, 10 to 100 us; some of the first ones milliseconds |
| follows | our EBNF: also tokens by their ids, and free text | our Lark: also intersections and complements |

Both follow the same rules, which `schema.py` and `regex.py` make. So neither the choice nor the machine decides which
outputs are valid.
"""

from collections.abc import Sequence
from typing import NamedTuple

from worker.structured_output.ebnf import START, Node, to_text
from worker.structured_output.lark import needs_lark
from worker.structured_output.unique_places import Place

XGRAMMAR, LLGUIDANCE = "xgrammar", "llguidance"

# xgrammar is tried where the number of rules, times the length of their text, stays below this: its serialisation has a
# copy of the whole automaton for each rule. Of 13 published schemas, those below took it up to 22 ms, and those above
# 40 ms to 1.5 s; llguidance took 6 to 36 ms.
_MOST_COPIED = 30_000
# What xgrammar may take before llguidance follows the grammar instead.
XGRAMMAR_CPU_S = 0.25
XGRAMMAR_BYTES = 256 << 20


class CompiledText(NamedTuple):
    """A compiled grammar, as one process sends it to another.

    | field | meaning |
    | --- | --- |
    | `engine` | `XGRAMMAR` or `LLGUIDANCE` |
    | `text` | xgrammar's serialisation, or the grammar in llguidance's Lark |
    | `places` | places of unique items in the values of the grammar, as `unique_places` returns them |
    | `cpu_s` | CPU time that the grammar has taken, with attempts that led nowhere |
    | `not_enforced` | keywords of the schema, with their places, that the grammar leaves out |
    """

    engine: str
    text: str
    cpu_s: float
    places: Sequence[Place] = ()
    not_enforced: Sequence[str] = ()


def engine_for(rules: dict[str, Node]) -> tuple[str, ...]:
    """The engines to try, in this order: the next one if one takes too much."""
    if needs_lark(rules) or len(rules) * len(to_text(rules, START)) > _MOST_COPIED:
        return (LLGUIDANCE,)
    return XGRAMMAR, LLGUIDANCE
