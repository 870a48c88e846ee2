"""Nodes, edges and the descent along a prompt, for the tree.

An edge is the tokens of one node as bytes, 4 a token, so that one `memcmp` compares it with a prompt. The key of a
child is the first page of its edge, exactly, not a hash that could collide. Two children of one node therefore differ
within their first page, and prefixes are shared in whole pages.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

import numpy as np

TOKEN_BYTES = 4


class Node:
    """A node of a tree. `edge` has its own tokens (none at the root); `children` has its children by the
    first page of their edges."""

    __slots__ = ("children", "edge", "number", "parent")

    def __init__(self, number: int, parent: Self | None, edge: bytes) -> None:
        self.number = number
        self.parent = parent
        self.edge = edge
        self.children: dict[bytes, Self] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of this node alone."""
        return len(self.edge) // TOKEN_BYTES


NO_PAGES = np.empty(0, dtype=np.int32)
NO_PAGES.flags.writeable = False


class NodeLease:
    """A promise to `client` to evict the path to `node` last (`Tree.lease`)."""

    __slots__ = ("client", "node")

    def __init__(self, node: "PagedNode", client: str) -> None:
        self.node = node
        self.client = client


class PagedNode(Node):
    """A node of `radix.tree.Tree`.

    | field | meaning |
    | --- | --- |
    | `pages` | int32, the pages with the KV of its own tokens |
    | `last_used` | time of its last use, by the tree's clock |
    | `locks` | locks on this node and on all nodes below it |
    | `own_locks` | locks on this node alone |
    | `leases` | leases on this node and on all nodes below it, by client |
    | `own_leases` | the leases on this node alone |
    | `queued` | the value of its entry in the eviction heap; None if it has none |
    """

    __slots__ = ("last_used", "leases", "locks", "own_leases", "own_locks", "pages", "queued")

    def __init__(self, number: int, parent: Self | None, edge: bytes) -> None:
        super().__init__(number, parent, edge)
        self.pages = NO_PAGES
        self.last_used: float = 0
        self.locks = 0
        self.own_locks = 0
        self.leases: dict[str, int] = {}
        self.own_leases: set[NodeLease] = set()
        self.queued: tuple[bool, float] | None = None


N = TypeVar("N", bound=Node)


def pack(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as bytes, 4 each. An int32 array is copied as it is; a list costs about 8 ns a token.

    Raises ValueError unless `tokens` is a sequence of integers that fit in 32 bits.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be integers of one dimension, not {tokens.dtype} {tokens.shape}")
        if tokens.dtype != np.int32 and tokens.size and not -(2**31) <= tokens.min() <= tokens.max() < 2**31:
            raise ValueError("token ids must fit in 32 bits")
        return tokens.astype(np.int32, copy=False).tobytes()
    try:
        return struct.pack(f"{len(tokens)}i", *tokens)
    except struct.error as error:
        raise ValueError(f"token ids must be integers that fit in 32 bits ({error})") from None


def whole_pages(prompt: bytes, page_bytes: int) -> bytes:
    """The prompt without the tokens of a last page that is not full."""
    return prompt[: len(prompt) // page_bytes * page_bytes]


def descend(root: N, prompt: bytes, page_bytes: int) -> tuple[N, int, int]:
    """Follows `prompt` (whole pages) down the tree, as far as whole pages agree.

    Returns (node, inside, end): the prompt agrees up to its byte `end`, which is byte `inside` of the edge of `node`.
    `inside` is the length of that edge, or less if the prompt leaves it, or ends, in its middle.
    """
    node, end = root, 0
    while (child := node.children.get(prompt[end : end + page_bytes])) is not None:
        edge = child.edge
        if not prompt.startswith(edge, end):
            inside = common_bytes(prompt, end, edge, page_bytes)
            return child, inside, end + inside
        node, end = child, end + len(edge)
    return node, len(node.edge), end


def common_bytes(prompt: bytes, start: int, edge: bytes, page_bytes: int) -> int:
    """Bytes of whole pages in which `prompt` from `start` on agrees with `edge`."""
    count = min(len(prompt) - start, len(edge)) // TOKEN_BYTES
    differs = np.frombuffer(prompt, np.int32, count, start) != np.frombuffer(edge, np.int32, count)
    first = int(differs.argmax())
    agreed = first if differs[first] else count
    return agreed * TOKEN_BYTES // page_bytes * page_bytes


def attach(node: N, page_bytes: int) -> None:
    """Adds `node` to its parent's children. Raises ValueError if there is already a child with that first page."""
    assert node.parent is not None
    key = node.edge[:page_bytes]
    if key in node.parent.children:
        raise ValueError(f"node {node.parent.number} already has a child that begins like node {node.number}")
    node.parent.children[key] = node


def insert_above(node: N, number: int, at: int, page_bytes: int) -> N:
    """Splits the edge of `node` and returns a new node `number`, between it and its parent, with the first `at`
    bytes."""
    assert node.parent is not None
    upper = type(node)(number, node.parent, node.edge[:at])
    node.parent.children[upper.edge[:page_bytes]] = upper
    node.edge = node.edge[at:]
    node.parent = upper
    upper.children[node.edge[:page_bytes]] = node
    return upper


def detach(node: N, page_bytes: int) -> N:
    """Removes the leaf `node` from its parent, and returns the parent. A node without a parent that is not the root has
    been removed."""
    parent = node.parent
    assert parent is not None and not node.children
    del parent.children[node.edge[:page_bytes]]
    node.parent = None
    return parent


def walk(root: N) -> Iterator[N]:
    """Every node, parents before children. Not recursive: a tree may be thousands of nodes deep."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
