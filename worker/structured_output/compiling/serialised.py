"""Compact serialisation of compiled grammars, for the transfer from the process that compiles them to the server.

In xgrammar all rules of a grammar share one automaton. xgrammar's serialisation gives each rule a copy of the whole
automaton, which the rule keeps when it is read again. But a rule only uses the states that its own start leads to. For
large schemas the copies were nine tenths of the text, and of the memory in the process that reads it. So here each copy
keeps only the edges of its rule's states.

Written for xgrammar 0.2.8, whose serialisation has `__VERSION__` "v16".
"""

from typing import Any

import msgspec

_Edge = tuple[int, int, int]  # two numbers for the condition, and the target state


class _Edges(msgspec.Struct):
    """Edges of all states, in rows: `data_[indptr_[i] : indptr_[i + 1]]` are those of state i."""

    data_: list[_Edge]
    indptr_: list[int]


class _Automaton(msgspec.Struct):
    edges: _Edges
    edge_aux_data: list[Any]
    edge_num: int


# ((automaton, start, ends, whether it is deterministic, a number), a number, a number); the numbers count edges or
# states.
_Rule = tuple[tuple[msgspec.Raw, int, list[int], bool, int], int, int]

_encode = msgspec.json.encode


def serialised(compiled: Any) -> bytes:
    """An `xgrammar.CompiledGrammar` (or the C++ object behind it) as JSON, for its `deserialize_json`."""
    whole = msgspec.json.decode(str(compiled.serialize_json()), type=dict[str, msgspec.Raw])
    grammar = msgspec.json.decode(whole["grammar"], type=dict[str, msgspec.Raw])
    shared = msgspec.json.decode(grammar["complete_fsm"], type=_Automaton)
    rules = msgspec.json.decode(grammar["per_rule_fsms"], type=list[_Rule | None])
    grammar["per_rule_fsms"] = msgspec.Raw(_encode([rule and _with_its_own(rule, shared) for rule in rules]))
    whole["grammar"] = msgspec.Raw(_encode(grammar))
    return _encode(whole)


def _with_its_own(rule: _Rule, shared: _Automaton) -> Any:
    """A rule with only the edges of the states that its start leads to. States keep their numbers."""
    (_, start, *others), *sizes = rule
    edges, ends = shared.edges.data_, shared.edges.indptr_
    found, to_follow = {start}, [start]
    while to_follow:
        state = to_follow.pop()
        for _, _, target in edges[ends[state] : ends[state + 1]]:
            if target not in found:
                found.add(target)
                to_follow.append(target)
    own: list[_Edge] = []
    indptr = [0]
    for state in range(max(found) + 1):
        if state in found:
            own += edges[ends[state] : ends[state + 1]]
        indptr.append(len(own))
    return [[_Automaton(_Edges(own, indptr), shared.edge_aux_data, len(own)), start, *others], *sizes]
