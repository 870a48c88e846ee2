"""What happens to a radix tree, told so that a listener can keep an exact copy (`radix.mirror.Mirror`).

Nodes have numbers that are never used twice in one incarnation of a tree; the root is 0.
"""

import msgspec


class Stored(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A new leaf `node` under `parent`, holding `tokens` (a whole number of pages)."""

    node: int
    parent: int
    tokens: list[int]


class Split(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`node` keeps its tokens from `at` on; a new node `upper` takes the first `at` and stands between it and its
    old parent."""

    node: int
    upper: int
    at: int


class Removed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The leaf `node` is gone."""

    node: int


Event = Stored | Split | Removed
