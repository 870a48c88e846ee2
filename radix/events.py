"""Events of a radix tree, by which a listener knows exactly what it has (`radix.index.PrefixIndex`).

Nodes have numbers; the root's is 0. One tree never uses a number twice, but a restarted replica's new tree may.
"""

import msgspec


class Stored(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A new leaf `node` under `parent`, with `tokens`: a whole number of pages, as `radix.node.pack` packs them."""

    node: int
    parent: int
    tokens: bytes


class Split(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A split of `node`: it keeps its tokens from `at` on. A new node `upper`, between it and its old parent, takes the
    first `at` tokens."""

    node: int
    upper: int
    at: int


class Removed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The leaf `node` was removed, with its checkpoint if it had one."""

    node: int


class Saved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A checkpoint of the states at the end of `node` was saved (`radix.checkpoints`). That of the root, before the
    first token, needs no row: it says that the prefixes of this tree can be continued from checkpoints only."""

    node: int


class Dropped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The checkpoint of `node` was evicted, and the node stays."""

    node: int


NodeEvent = Stored | Split | Removed
CheckpointEvent = Saved | Dropped
Event = NodeEvent | CheckpointEvent
