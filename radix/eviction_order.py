"""Eviction policies. A policy is a function that gives a node's value: the leaf with the lowest value is evicted first,
of those without a lease as long as there are any.

The tree calls it again only when a leaf reaches the top of its heap. So the value of a node in the heap may rise, but
must never fall.
"""

from typing import Protocol


class Used(Protocol):
    """The attributes of a node that a policy may read."""

    last_used: float


def lru(node: Used) -> float:
    """The policy that evicts the least recently matched or inserted leaf first."""
    return node.last_used
