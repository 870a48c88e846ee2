"""What the tree and its mirrors share: nodes, edges, and descending along a prompt.

An edge is the tokens of one node as bytes, 4 a token, so that comparing one with a prompt is one `memcmp`. A node's
children are told apart by the first page of their edge, exactly (no hash that could collide): two children of one node
always differ within their first page, which is why prefixes are shared in whole pages.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

import numpy as np

from radix.events import Stored

TOKEN_BYTES = 4


class Node:
    """One node: `edge` holds its own tokens (none at the root), `children` is keyed by the first page of theirs."""

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


N = TypeVar("N", bound=Node)


def pack(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as bytes, 4 each. An int32 array is copied as it is; a list costs about 8 ns a token.

    Raises ValueError for what is no sequence of ids within 32 bits.
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


def unpack(edge: bytes) -> list[int]:
    """The token ids in `edge`."""
    return np.frombuffer(edge, dtype=np.int32).tolist()


def whole_pages(prompt: bytes, page_bytes: int) -> bytes:
    """`prompt` without the tokens of a last page that is not full."""
    return prompt[: len(prompt) // page_bytes * page_bytes]


def descend(root: N, prompt: bytes, page_bytes: int) -> tuple[N, int, int]:
    """Follows `prompt` (whole pages) as far as the tree agrees with it, in whole pages.

    Returns (node, inside, end): the prompt agrees up to byte `end`, which is byte `inside` of the edge of `node`;
    `inside` is the edge's length unless the prompt leaves it, or ends, in its middle.
    """
    node, end = root, 0
    while (child := node.children.get(prompt[end : end + page_bytes])) is not None:
        edge = child.edge
        if not prompt.startswith(edge, end):
            inside = _common(prompt, end, edge, page_bytes)
            return child, inside, end + inside
        node, end = child, end + len(edge)
    return node, len(node.edge), end


def _common(prompt: bytes, start: int, edge: bytes, page_bytes: int) -> int:
    """Bytes of whole pages in which `prompt` from `start` on agrees with `edge`."""
    count = min(len(prompt) - start, len(edge)) // TOKEN_BYTES
    differs = np.frombuffer(prompt, np.int32, count, start) != np.frombuffer(edge, np.int32, count)
    first = int(differs.argmax())
    agreed = first if differs[first] else count
    return agreed * TOKEN_BYTES // page_bytes * page_bytes


def attach(node: N, page_bytes: int) -> None:
    """Hangs `node` under its parent. Raises ValueError when a child with that first page is there already."""
    assert node.parent is not None
    key = node.edge[:page_bytes]
    if key in node.parent.children:
        raise ValueError(f"node {node.parent.number} already has a child that begins like node {node.number}")
    node.parent.children[key] = node


def insert_above(node: N, number: int, at: int, page_bytes: int) -> N:
    """Splits the edge of `node`: a new node `number` with its first `at` bytes comes between it and its parent."""
    assert node.parent is not None
    upper = type(node)(number, node.parent, node.edge[:at])
    node.parent.children[upper.edge[:page_bytes]] = upper
    node.edge = node.edge[at:]
    node.parent = upper
    upper.children[node.edge[:page_bytes]] = node
    return upper


def detach(node: N, page_bytes: int) -> N:
    """Takes the leaf `node` from its parent, which is returned. A node without a parent that is no root is dead."""
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


def snapshot(root: Node) -> list[Stored]:
    """Events that build the same tree from nothing, parents before children."""
    return [
        Stored(node.number, node.parent.number, unpack(node.edge)) for node in walk(root) if node.parent is not None
    ]
