"""Salts: prefixes that are cached apart although their tokens are the same.

A prefix tree compares tokens, and begins at the first. So tokens that are changed at their beginning, in a way that
only the salt tells, never meet those of another salt, in the tree of a replica or in its mirror at a router.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

# Tokens that are changed. Vocabularies have at most 2^19 tokens, so that 12 bits of each tell two salts apart.
CHANGED = 64
_BITS = (1 << 31) - 1


def salted(token_ids: Sequence[int] | np.ndarray, salt: str) -> np.ndarray:
    """The keys of `token_ids` (int32, not negative) in a tree, int32 of the same length: the tokens themselves where
    the salt is empty."""
    keys = np.array(token_ids, dtype=np.int32)
    if salt:
        keys[:CHANGED] ^= _mask(salt)[: len(keys)]
    return keys


def adapter_salt(salt: str, adapter: str) -> str:
    """The salt of a prefix that was computed with an adapter, and has a salt of its own. `adapter`: what tells it from
    all others."""
    return f"{salt}\0adapter\0{adapter}"


@lru_cache(maxsize=4096)
def _mask(salt: str) -> np.ndarray:
    digest = hashlib.shake_256(salt.encode("utf-8", "surrogatepass")).digest(4 * CHANGED)
    return np.frombuffer(digest, dtype="<i4") & _BITS
