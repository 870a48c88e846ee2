"""A router's index of what all replicas have cached: one radix tree, in which each node knows its holders.

The replicas' own trees are laid over each other. A node of the index ends wherever a node of any of these trees ends,
so a node of a replica is a path of one or more nodes here. The holders of a node are bits of an integer. One walk along
a prompt therefore finds the cached length on every replica, however many there are.

    index of two replicas       [A|B|C] on both ── [D] on the first, bits 01
                                        11      └─ [E|F] on the second, bits 10

A cache that is dropped is hidden at once, and removed from the nodes little by little (`PrefixIndex.tidy`). Until then
its bit is not given to another.
"""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radix.events import Event, Removed, Split, Stored
from radix.node import TOKEN_BYTES, common_bytes

NO_CHILDREN: dict[bytes, "IndexNode"] = {}  # of every leaf: never changed


class IndexNode:
    """A node of the index. `edge` has its own tokens, `holders` the bits of the caches that have them, `children` its
    children by the first page of their edges."""

    __slots__ = ("children", "edge", "holders", "parent")

    def __init__(self, parent: "IndexNode | None", edge: bytes, holders: int) -> None:
        self.parent = parent
        self.edge = edge
        self.holders = holders
        self.children = NO_CHILDREN


class HeldNode:
    """A node of one replica's tree: where it ends in the index, its parent in the replica's tree, its own bytes, and
    the number of its children there."""

    __slots__ = ("end", "num_bytes", "num_children", "parent")

    def __init__(self, end: IndexNode, parent: "HeldNode | None", num_bytes: int, num_children: int) -> None:
        self.end = end
        self.parent = parent
        self.num_bytes = num_bytes
        self.num_children = num_children


class IndexedCache:
    """The cache of a replica in the index, updated by the events of the replica's tree."""

    def __init__(self, index: "PrefixIndex", slot: int) -> None:
        self.index = index
        self.slot = slot  # its place in the array of `PrefixIndex.match`
        self._bit = 1 << slot
        self._page_bytes = index.page_size * TOKEN_BYTES
        self._nodes = {0: HeldNode(index.root, None, 0, 0)}
        self._num_bytes = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the replica has cached."""
        return self._num_bytes // TOKEN_BYTES

    def apply(self, event: Event) -> None:
        """Applies one event. Raises ValueError, and changes nothing, if the event does not fit those before it. Then
        the listener must drop this cache and ask for a snapshot."""
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            self._remove(event)
        else:
            self._split(event)

    def clear(self, most: int) -> int:
        """Takes at most `most` nodes of a dropped cache out of the index, in any order. Returns how many it took."""
        for taken in range(most):
            if not self._nodes:
                return taken
            _, held = self._nodes.popitem()
            if held.parent is not None:
                self._take_out(held, held.parent.end)
        return most

    def _store(self, event: Stored) -> None:
        tokens, page_bytes, bit = event.tokens, self._page_bytes, self._bit
        if not tokens or len(tokens) % page_bytes:
            raise ValueError(
                f"node {event.node} has {len(tokens)} bytes of tokens: not whole pages of {self.index.page_size} tokens"
            )
        if event.node in self._nodes:
            raise ValueError(f"node {event.node} is there already")
        parent = self._known(event.parent)
        node, at = parent.end, 0
        child = node.children.get(tokens[:page_bytes])
        if child is not None and child.holders & bit:
            raise ValueError(f"node {event.parent} already has a child that begins like node {event.node}")
        while child is not None:
            if not tokens.startswith(child.edge, at):
                inside = common_bytes(tokens, at, child.edge, page_bytes)
                child = _split(child, inside, page_bytes)
            child.holders |= bit
            node, at = child, at + len(child.edge)
            if at == len(tokens):
                break
            child = node.children.get(tokens[at : at + page_bytes])
        if at < len(tokens):
            leaf = IndexNode(node, tokens[at:] if at else tokens, bit)
            _attach(leaf, node, page_bytes)
            node = leaf
        self._nodes[event.node] = HeldNode(node, parent, len(tokens), 0)
        parent.num_children += 1
        self._num_bytes += len(tokens)

    def _split(self, event: Split) -> None:
        held, at = self._known(event.node), event.at * TOKEN_BYTES
        if event.upper in self._nodes:
            raise ValueError(f"node {event.upper} is there already")
        if held.parent is None or not 0 < at < held.num_bytes or at % self._page_bytes:
            raise ValueError(
                f"node {event.node} of {held.num_bytes // TOKEN_BYTES} tokens cannot be split at {event.at}"
            )
        node, below = held.end, held.num_bytes - at
        while len(node.edge) <= below:
            below -= len(node.edge)
            assert node.parent is not None
            node = node.parent
            if not below:
                break
        if below:
            node = _split(node, len(node.edge) - below, self._page_bytes)
        upper = HeldNode(node, held.parent, at, 1)
        held.parent, held.num_bytes = upper, held.num_bytes - at
        self._nodes[event.upper] = upper

    def _remove(self, event: Removed) -> None:
        held = self._known(event.node)
        if held.num_children or held.parent is None:
            raise ValueError(f"node {event.node} is no leaf")
        del self._nodes[event.node]
        held.parent.num_children -= 1
        self._num_bytes -= held.num_bytes
        self._take_out(held, held.parent.end)

    def _take_out(self, held: HeldNode, above: IndexNode) -> None:
        """Takes the bit off the nodes from `held.end` up to `above`, without it, and removes those without
        a holder."""
        node, bit, page_bytes = held.end, self._bit, self._page_bytes
        while node is not above:
            parent = node.parent
            assert parent is not None
            node.holders ^= bit
            if not node.holders and not node.children:
                del parent.children[node.edge[:page_bytes]]
            node = parent
        # Dropped caches are taken out in any order, so that a parent may have lost its last holder before.
        while not node.holders and not node.children and (up := node.parent) is not None:
            del up.children[node.edge[:page_bytes]]
            node = up

    def _known(self, number: int) -> HeldNode:
        if (held := self._nodes.get(number)) is None:
            raise ValueError(f"node {number} is not known")
        return held


class PrefixIndex:
    """The caches of all replicas with pages of one size."""

    def __init__(self, page_size: int) -> None:
        """Raises ValueError for a page size outside 1 .. 64 tokens."""
        if not 1 <= page_size <= 64:
            raise ValueError(f"page_size must be 1 to 64 tokens, not {page_size}")
        self.page_size = page_size
        self.root = IndexNode(None, b"", 0)
        self._live = 0  # bits of the caches that are not dropped
        self._free: list[int] = []  # slots
        self._dropped: deque[IndexedCache] = deque()
        self.num_slots = 0

    def add(self) -> IndexedCache:
        """A new, empty cache."""
        if self._free:
            slot = self._free.pop()
        else:
            slot, self.num_slots = self.num_slots, self.num_slots + 1
        self._live |= 1 << slot
        return IndexedCache(self, slot)

    def drop(self, cache: IndexedCache) -> None:
        """Forgets a cache. Its memory comes back by calls of `tidy`."""
        self._live &= ~(1 << cache.slot)
        self._dropped.append(cache)

    def tidy(self, most: int) -> None:
        """Takes at most `most` nodes of dropped caches out of the index, each in about a microsecond."""
        while self._dropped and most > 0:
            cache = self._dropped[0]
            taken = cache.clear(most)
            if taken < most:
                self._dropped.popleft()
                self._free.append(cache.slot)
            most -= taken

    def match(self, prompt: bytes) -> NDArray[np.float64]:
        """Tokens in the longest cached prefix of `prompt` (as `radix.node.pack` has it) on each replica, in whole
        pages; float64 [num_slots + 1], by slots. The last entry is 0, for a replica without a cache."""
        cached = np.zeros(self.num_slots + 1)
        page_bytes, node, holders, end = self.page_size * TOKEN_BYTES, self.root, self._live, 0
        while (child := node.children.get(prompt[end : end + page_bytes])) is not None:
            still = holders & child.holders
            if still != holders:
                if end:
                    set_slots(cached, holders ^ still, end // TOKEN_BYTES)
                if not still:
                    return cached
                holders = still
            if not prompt.startswith(child.edge, end):
                end += common_bytes(prompt, end, child.edge, page_bytes)
                break
            node, end = child, end + len(child.edge)
        if end:
            set_slots(cached, holders, end // TOKEN_BYTES)
        return cached


def set_slots(values: NDArray[Any], bits: int, value: float) -> None:
    """Sets `values[slot]` for each bit `slot` of `bits`."""
    if bits.bit_count() <= 4:
        while bits:
            slot = bits.bit_length() - 1
            values[slot] = value
            bits ^= 1 << slot
        return
    packed = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
    values[np.unpackbits(packed, bitorder="little").nonzero()[0]] = value


def _attach(node: IndexNode, parent: IndexNode, page_bytes: int) -> None:
    if parent.children is NO_CHILDREN:
        parent.children = {}
    parent.children[node.edge[:page_bytes]] = node


def _split(node: IndexNode, at: int, page_bytes: int) -> IndexNode:
    """Gives the first `at` bytes of `node` to a new node above it, and returns that. Where `node` ends is unchanged, so
    what refers to its end stays true."""
    parent = node.parent
    assert parent is not None
    upper = IndexNode(parent, node.edge[:at], node.holders)
    parent.children[upper.edge[:page_bytes]] = upper
    node.edge, node.parent = node.edge[at:], upper
    upper.children = {node.edge[:page_bytes]: node}
    return upper
