"""Tokens of a vocabulary that may end a value within an array, or the array."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np


class BoundaryTokens:
    """The tokens of a vocabulary by what they may end, as rows of a bitmask, and in the order of their texts."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """`tokens`: the text of each token."""
        ids = sorted((i for i, text in enumerate(tokens) if text), key=tokens.__getitem__)
        self.ids, self.texts = ids, [tokens[i] for i in ids]
        self._size = len(tokens)
        some, several = rb"[,\]]", rb"[,\]].*[,\]]|\[.*[,\]]|,.*\".*\""
        self.ends_one = (self._row(some), self._row(rb'".*' + some))
        """Tokens that may end an item: from outside of a string, and from within one."""
        self.ends_inner = (self._row(several), self._row(rb'".*(?:' + several + rb")"))
        """Tokens that may end an item that begins in them, or a string of it."""

    def _row(self, pattern: bytes) -> "np.ndarray[Any, Any]":
        row = np.zeros(-(-self._size // 32), dtype=np.uint32)
        search = re.compile(pattern, re.DOTALL).search
        for token_id, text in zip(self.ids, self.texts, strict=True):
            if search(text):
                row[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return row
