"""Intersections of regular nodes, of which llguidance tells whether any text is in them."""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from worker.structured_output.error import GrammarError
from worker.structured_output.matching.lazy_grammar import LazyGrammar
from worker.structured_output.matching.lazy_matcher import LazyVocabulary
from worker.structured_output.rules.ebnf import NEVER, Intersection, Node, without_dead_ends
from worker.structured_output.rules.lark import to_lark


def intersection(parts: Sequence[Node], what: str) -> Node:
    """A node for what all parts match, NEVER if that is nothing. `what`: keywords and their place, for messages. Raises
    GrammarError if there is no telling."""
    found = tuple(map(without_dead_ends, parts))
    if NEVER in found:
        return NEVER
    if len(found) == 1:
        return found[0]
    node = Intersection(found, what)
    return node if _has_texts(node) else NEVER


@lru_cache(1024)
def _has_texts(node: Intersection) -> bool:
    try:
        matcher = LazyGrammar(to_lark({"start": node}, "start"), _of_bytes()).matcher()
    except ValueError as error:
        if "fuel" in str(error):
            raise GrammarError(f"{node.what}: it takes too much to tell what satisfies all of it") from None
        raise GrammarError(f"{node.what}: {error}") from None
    allowed = np.zeros((1, -(-len(_of_bytes().tokens) // 32)), dtype=np.int32)
    matcher.fill_next_token_bitmask(allowed)
    return matcher.is_completed() or bool(allowed.any())


@cache
def _of_bytes() -> LazyVocabulary:
    return LazyVocabulary([*(bytes([byte]) for byte in range(255)), b"\xff\xff", b"\xff<end>"], [256])
