"""Suffix automata of token ids, built online, in one array each, compiled by numba at import. Import it only where one
is used.

A state is a set of texts that end at the same places (Blumer et al.: The smallest automaton recognizing the subwords of
a text, 1985). With n tokens there are at most 2n states and 3n transitions. So capacity for n tokens, once allocated,
is enough for any n tokens. Memory that a text does not need is never touched, and the system does not provide it.

An automaton is an int32 array:

| part | int32s | content |
| --- | --- | --- |
| header | 16 | counts and offsets, by the names below |
| states | 8 each, for 2n + 2 | `LINK`, `LENGTH`, `COUNT`, the first transition's `TOKEN` and `TARGET`, `HEAD` of the list of further transitions, `BEST` |
| edges | 4 each, for 2n + 2 | further transitions: state, token, target, next edge of that state |
| table | 3n + 8 | hash table of edges by state and token, open addressing; index + 1, or 0 |

State 0 is the empty text. `COUNT` says how often the state's texts occur, by the weights of `extend`. `BEST` is the
transition to the target with the highest count, the latest of equal ones; -1 is the first transition, others are edges.
Counts and best transitions of a place are kept up for the `_MAX_CONTEXTS` longest contexts there.
"""  # noqa: E501

import numpy as np
from numba import njit, types

TOKENS, STATES, EDGES, CAPACITY, EDGES_AT, TABLE_AT, TABLE_SIZE = range(7)
_HEADER, _STATE, _EDGE = 16, 8, 4
LINK, LENGTH, COUNT, TOKEN, TARGET, HEAD, BEST = range(7)
_MAX_CONTEXTS = 24
_MIN_CONTEXT_TOKENS = 4  # tokens of context to go on with where a text ends

# Where a sequence is: in its own automaton, and in the replica's newer and older one. `LAST` is the state of its whole
# text, `STATE` and `LENGTH` are those of its longest suffix that occurs elsewhere. `OWN_LENGTH` is -1 if the whole text
# is in its own automaton, whose last state then knows of this suffix.
OWN_LAST, OWN_STATE, OWN_LENGTH, NEW_LAST, NEW_STATE, NEW_LENGTH, OLD_STATE, OLD_LENGTH, NUM_PLACES = range(9)
# What `propose` tells: the length of the suffix, whether it is from the replica's texts, how often it occurs there, and
# how often with the proposed token after it.
FOUND_LENGTH, FOUND_SHARED, FOUND_TIMES, FOUND_CHOSEN, NUM_FOUND = range(5)

_ARRAY = types.Array(types.int32, 1, "C")
_I = types.int64


def new_automaton(capacity: int) -> np.ndarray:
    """The automaton of no text, with room for `capacity` tokens."""
    states, edges, table = 2 * capacity + 2, 2 * capacity + 2, 3 * capacity + 8
    edges_at = _HEADER + _STATE * states
    table_at = edges_at + _EDGE * edges
    automaton = np.zeros(table_at + table, dtype=np.int32)
    automaton[: TABLE_SIZE + 1] = 0, 1, 0, capacity, edges_at, table_at, table
    automaton[_HEADER + LINK] = automaton[_HEADER + TARGET] = -1
    automaton[_HEADER + HEAD] = automaton[_HEADER + BEST] = -1
    return automaton


def grown(automaton: np.ndarray, capacity: int) -> np.ndarray:
    """The same automaton with room for `capacity` tokens. States keep their numbers."""
    larger = new_automaton(capacity)
    larger[: EDGES + 1] = automaton[: EDGES + 1]
    states = slice(_HEADER, _HEADER + _STATE * automaton[STATES])
    larger[states] = automaton[states]
    edges = _EDGE * automaton[EDGES]
    larger[larger[EDGES_AT] : larger[EDGES_AT] + edges] = automaton[automaton[EDGES_AT] : automaton[EDGES_AT] + edges]
    _rehash(larger)
    return larger


@njit(inline="always")
def _hash(a, state, token):  # type: ignore[no-untyped-def]
    """A place in the table."""
    x = np.uint64(state) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(np.uint32(token))
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return np.int64(((x >> np.uint64(32)) * np.uint64(a[TABLE_SIZE])) >> np.uint64(32))


@njit(inline="always")
def _enter(a, edge, state, token):  # type: ignore[no-untyped-def]
    at, size = a[TABLE_AT], a[TABLE_SIZE]
    h = _hash(a, state, token)
    while a[at + h] != 0:
        h += 1
        if h == size:
            h = 0
    a[at + h] = edge + 1


@njit(types.void(_ARRAY), cache=True)
def _rehash(a):  # type: ignore[no-untyped-def]
    for edge in range(a[EDGES]):
        e = a[EDGES_AT] + _EDGE * edge
        _enter(a, edge, a[e], a[e + 1])


@njit(_I(_ARRAY, _I, _I), cache=True)
def _find(a, state, token):  # type: ignore[no-untyped-def]
    """Index in `a` of the target of a transition; -1 if there is none."""
    s = _HEADER + _STATE * state
    if a[s + TARGET] >= 0 and a[s + TOKEN] == token:
        return s + TARGET
    if a[s + HEAD] < 0:
        return -1
    at, edges_at, size = np.int64(a[TABLE_AT]), np.int64(a[EDGES_AT]), a[TABLE_SIZE]
    h = _hash(a, state, token)
    while True:
        edge = a[at + h]
        if edge == 0:
            return -1
        e = edges_at + _EDGE * (edge - 1)
        if a[e] == state and a[e + 1] == token:
            return e + 2
        h += 1
        if h == size:
            h = 0


@njit(_I(_ARRAY, _I, _I, _I), cache=True)
def _connect(a, state, token, target):  # type: ignore[no-untyped-def]
    """Makes a transition. Returns its number as in `BEST`."""
    s = _HEADER + _STATE * state
    if a[s + TARGET] < 0:
        a[s + TOKEN] = token
        a[s + TARGET] = target
        return -1
    edge = np.int64(a[EDGES])
    a[EDGES] += 1
    e = a[EDGES_AT] + _EDGE * edge
    a[e] = state
    a[e + 1] = token
    a[e + 2] = target
    a[e + 3] = a[s + HEAD]
    a[s + HEAD] = edge
    _enter(a, edge, state, token)
    return edge


@njit(_I(_ARRAY, _I, _I, _I), cache=True)
def _new_state(a, link, length, count):  # type: ignore[no-untyped-def]
    state = np.int64(a[STATES])
    a[STATES] += 1
    s = _HEADER + _STATE * state
    a[s + LINK] = link
    a[s + LENGTH] = length
    a[s + COUNT] = count
    a[s + TARGET] = -1
    a[s + HEAD] = -1
    a[s + BEST] = -1
    return state


@njit(_I(_ARRAY, _I, _I, _I), cache=True)
def _split(a, before, token, state):  # type: ignore[no-untyped-def]
    """Gives the texts of `state` that are no longer than those of `before` and `token` a state of their own."""
    s = _HEADER + _STATE * state
    part = _new_state(a, a[s + LINK], a[_HEADER + _STATE * before + LENGTH] + 1, a[s + COUNT])
    p = _HEADER + _STATE * part
    a[p + TOKEN] = a[s + TOKEN]
    a[p + TARGET] = a[s + TARGET]
    edge = np.int64(a[s + HEAD])
    while edge >= 0:
        e = a[EDGES_AT] + _EDGE * edge
        copied = _connect(a, part, a[e + 1], a[e + 2])
        if edge == a[s + BEST]:
            a[p + BEST] = copied
        edge = np.int64(a[e + 3])
    a[s + LINK] = part
    while before >= 0:
        slot = _find(a, before, token)
        if a[slot] != state:
            break
        a[slot] = part
        before = np.int64(a[_HEADER + _STATE * before + LINK])
    return part


@njit(inline="always")
def _best(a, state):  # type: ignore[no-untyped-def]
    """Index in `a` of the token of the best transition; the target follows. There is a transition."""
    s = _HEADER + _STATE * state
    best = a[s + BEST]
    return s + TOKEN if best < 0 else np.int64(a[EDGES_AT]) + _EDGE * best + 1


@njit(inline="always")
def _length(a, state):  # type: ignore[no-untyped-def]
    return a[_HEADER + _STATE * state + LENGTH]


@njit(inline="always")
def _link(a, state):  # type: ignore[no-untyped-def]
    return np.int64(a[_HEADER + _STATE * state + LINK])


@njit(_I(_ARRAY, _I, _I, _I), cache=True)
def _extend(a, last, token, weight):  # type: ignore[no-untyped-def]
    """Adds a token after the text whose state is `last`. Returns the state of the longer text."""
    a[TOKENS] += 1
    slot = _find(a, last, token)
    if slot >= 0:  # of another text
        now = np.int64(a[slot])
        if _length(a, now) != _length(a, last) + 1:
            now = _split(a, last, token, now)
    else:
        now = _new_state(a, 0, _length(a, last) + 1, 0)
        before = last
        while before >= 0:
            slot = _find(a, before, token)
            if slot >= 0:
                break
            _connect(a, before, token, now)
            before = _link(a, before)
        if before >= 0:
            other = np.int64(a[slot])
            if _length(a, other) != _length(a, before) + 1:
                other = _split(a, before, token, other)
            a[_HEADER + _STATE * now + LINK] = other
    state = now
    for _ in range(_MAX_CONTEXTS):
        if state <= 0:
            break
        a[_HEADER + _STATE * state + COUNT] += weight
        state = _link(a, state)
    context, state = last, now
    for _ in range(_MAX_CONTEXTS):
        if context <= 0:
            break
        while _length(a, _link(a, state)) > _length(a, context):
            state = _link(a, state)
        best = np.int64(a[_best(a, context) + 1])
        if best != state and a[_HEADER + _STATE * state + COUNT] >= a[_HEADER + _STATE * best + COUNT]:
            s, slot = _HEADER + _STATE * context, _find(a, context, token)
            a[s + BEST] = -1 if slot == s + TARGET else (slot - 2 - a[EDGES_AT]) // _EDGE
        context = _link(a, context)
    return now


@njit(inline="always")
def _settled(a, state, length):  # type: ignore[no-untyped-def]
    """The state of a text that was in `state` before others were split off."""
    while state > 0 and length <= _length(a, _link(a, state)):
        state = _link(a, state)
    return state


@njit(types.UniTuple(_I, 2)(_ARRAY, _I, _I, _I), cache=True)
def _matched(a, state, length, token):  # type: ignore[no-untyped-def]
    """The longest suffix that occurs in `a` of a text of which this suffix did, and of `token`: state and length."""
    state = _settled(a, state, length)
    while True:
        slot = _find(a, state, token)
        if slot >= 0:
            return np.int64(a[slot]), length + 1
        if state == 0:
            return np.int64(0), np.int64(0)
        state = _link(a, state)
        length = np.int64(_length(a, state))


@njit(_I(_ARRAY, _ARRAY, _I, _I), cache=True)
def extend(a, tokens, last, weight):  # type: ignore[no-untyped-def]
    """Adds tokens int32[n], for which there is room, after the text whose state is `last`. State 0 begins a new text.
    Occurrences count `weight` each. Returns the state of the longer text."""
    for token in tokens:
        last = _extend(a, last, token, weight)
    return last


@njit(types.UniTuple(_I, 2)(_ARRAY, _ARRAY, _I, _I), cache=True)
def match(a, tokens, state, length):  # type: ignore[no-untyped-def]
    """The state and length of the longest suffix that occurs in `a`, after `tokens` int32[n] have followed a text whose
    longest suffix was in `state`, with `length`."""
    for token in tokens:
        state, length = _matched(a, state, length, token)
    return _settled(a, state, length), length


@njit(types.void(_ARRAY, _ARRAY, _ARRAY, _ARRAY, _ARRAY), cache=True)
def follow(own, new, old, places, tokens):  # type: ignore[no-untyped-def]
    """Adds output tokens int32[n] of a sequence to its own automaton and to the replica's newer one, and looks for the
    longest suffixes in those of the replica. An `own` without room is left as it is."""
    own_last, new_last = np.int64(places[OWN_LAST]), np.int64(places[NEW_LAST])
    new_state, new_length = np.int64(places[NEW_STATE]), np.int64(places[NEW_LENGTH])
    old_state, old_length = np.int64(places[OLD_STATE]), np.int64(places[OLD_LENGTH])
    room = own[CAPACITY] - own[TOKENS] >= len(tokens)
    for token in tokens:
        if room:
            own_last = _extend(own, own_last, token, 1)
        # First the match: the sequence's own token is not found there.
        new_state, new_length = _matched(new, new_state, new_length, token)
        old_state, old_length = _matched(old, old_state, old_length, token)
        new_last = _extend(new, new_last, token, 1)
    places[OWN_LAST], places[NEW_LAST] = own_last, new_last
    places[NEW_STATE], places[NEW_LENGTH] = new_state, new_length
    places[OLD_STATE], places[OLD_LENGTH] = old_state, old_length


@njit(_I(_ARRAY, _I, _I, _I, _ARRAY), cache=True)
def continue_from(a, state, most, least, tokens):  # type: ignore[no-untyped-def]
    """Writes the best tokens after a state's text into `tokens` int32[>= most]. Where a text ends, goes on after its
    longest suffix that occurs elsewhere, if that has `least` tokens. Negative tokens end a text. Returns how many."""
    count = 0
    while count < most:
        while state > 0 and (a[_HEADER + _STATE * state + TARGET] < 0 or a[_best(a, state)] < 0):
            state = _link(a, state)
            if _length(a, state) < least:
                return count
        if state <= 0:
            break
        best = _best(a, state)
        tokens[count] = a[best]
        count += 1
        state = np.int64(a[best + 1])
    return count


@njit(_I(_ARRAY, _ARRAY, _ARRAY, _ARRAY, _I, _ARRAY, _ARRAY), cache=True)
def propose(own, new, old, places, most, tokens, found):  # type: ignore[no-untyped-def]
    """Writes the best tokens after a sequence's longest suffix that occurs elsewhere into `tokens` int32[>= most], and
    about this suffix into `found` int32[NUM_FOUND]. Returns how many tokens. The sequence's own texts come first, if
    the replica's have no longer suffix."""
    a, state = own, np.int64(places[OWN_STATE])
    length = np.int64(places[OWN_LENGTH])
    if length < 0:  # all of the sequence is in its automaton, whose last state knows
        state = _link(own, np.int64(places[OWN_LAST])) if places[OWN_LAST] > 0 else np.int64(0)
        length = np.int64(_length(own, state))
    shared = 0
    if places[NEW_LENGTH] > length:
        a, state, length, shared = new, np.int64(places[NEW_STATE]), np.int64(places[NEW_LENGTH]), 1
    if places[OLD_LENGTH] > length:
        a, state, length, shared = old, np.int64(places[OLD_STATE]), np.int64(places[OLD_LENGTH]), 1
    state = _settled(a, state, length)
    found[FOUND_LENGTH], found[FOUND_SHARED] = length, shared
    found[FOUND_TIMES], found[FOUND_CHOSEN] = a[_HEADER + _STATE * state + COUNT], 0
    count = continue_from(a, state, most, min(length, _MIN_CONTEXT_TOKENS), tokens)
    if count and a[_HEADER + _STATE * state + TARGET] >= 0:
        found[FOUND_CHOSEN] = a[_HEADER + _STATE * np.int64(a[_best(a, state) + 1]) + COUNT]
    return count
