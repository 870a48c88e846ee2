"""Salts of the prefix cache."""

import numpy as np
import pytest

from radix.index import PrefixIndex
from radix.node import pack
from radix.pages import PagePool
from radix.salt import CHANGED, salted
from radix.tree import Tree


def test_without_a_salt_nothing_changes() -> None:
    assert salted([1, 2, 3], "").tolist() == [1, 2, 3] and salted([], "a").tolist() == []


@pytest.mark.parametrize("length", [1, CHANGED - 1, CHANGED, 3 * CHANGED])
def test_a_salt_changes_the_beginning_and_keeps_prefixes(length: int) -> None:
    tokens = np.arange(length, dtype=np.int32)
    keys = salted(tokens, "a")
    assert keys.dtype == np.int32 and (keys >= 0).all() and tokens.tolist() == list(range(length))
    assert (keys[CHANGED:] == tokens[CHANGED:]).all() and (keys[:CHANGED] != tokens[:CHANGED]).any()
    assert (salted(tokens[: length // 2], "a") == keys[: length // 2]).all()  # a prefix's keys are a prefix of the keys
    assert (salted(tokens, "a") == keys).all() and (salted(tokens, "b") != keys).any()


def test_no_tokens_of_a_vocabulary_meet_those_of_another_salt() -> None:
    """In the first page, however an attacker chooses his tokens: the bits above the vocabulary's differ."""
    above = [salted([0] * 16, salt) >> 19 for salt in ("", *map(str, range(500)))]
    assert len({tuple(bits.tolist()) for bits in above}) == 501


def test_trees_and_indexes_keep_salts_apart() -> None:
    index = PrefixIndex(4)
    cache = index.add()
    tree = Tree(4, PagePool(16, 4), on_event=cache.apply)
    tokens = list(range(12))
    tree.insert(salted(tokens, "a"), tree.pool.allocate(3))
    for salt, found in (("a", 12), ("b", 0), ("", 0)):
        assert tree.match(salted(tokens, salt)).num_tokens == found
        assert index.match(pack(salted(tokens, salt)))[cache.slot] == found
