"""Which leaf is worth least. A policy is one function of a node; the leaf with the lowest value is evicted first.

The tree asks again only when a leaf reaches the top of its heap, so a node's value may rise while it waits there but
must never fall.
"""

from typing import Protocol


class Used(Protocol):
    """What a policy may know of a node."""

    last_used: float


def lru(node: Used) -> float:
    """The least recently matched or inserted goes first."""
    return node.last_used
