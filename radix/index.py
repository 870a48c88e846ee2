"""A router's index of what all replicas have cached: one radix tree, in which each node knows its holders.

The replicas' own trees are laid over each other. A node of the index ends wherever a node of any of these trees ends,
so a node of a replica is a path of one or more nodes here. The holders of a node are bits of an integer. One walk along
a prompt therefore finds the cached length on every replica, however many there are.

    index of two replicas       [A|B|C] on both ── [D] on the first, bits 01
                                        11      └─ [E|F] on the second, bits 10

The replicas of a model with recurrent states tell their checkpoints (`radix.checkpoints`). There a prefix counts up to
the deepest of them.

A cache that is dropped is hidden at once, and removed from the nodes little by little (`PrefixIndex.tidy`). Until then
its bit is not given to another.

Nodes are numbers, their fields are rows of lists: hundreds of thousands of objects would stop the event loop for as
many microseconds whenever Python's garbage collector walks them all.
"""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radix.events import Dropped, Event, Removed, Saved, Split, Stored
from radix.node import TOKEN_BYTES, common_bytes

ROOT = 0


class IndexedCache:
    """The cache of a replica in the index, updated by the events of the replica's tree."""

    def __init__(self, index: "PrefixIndex", slot: int) -> None:
        self.index = index
        self.slot = slot  # its place in the array of `PrefixIndex.match`
        self._bit = 1 << slot
        # By number in the replica's tree: the node of the index where it ends, its parent's number, and its own bytes.
        self._nodes = {0: (ROOT, -1, 0)}
        self._num_children: dict[int, int] = {}  # of nodes that have children in the replica's tree
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
        elif isinstance(event, Split):
            self._split(event)
        else:
            self._change_checkpoint(event)

    def clear(self, most: int) -> int:
        """Takes at most `most` nodes of a dropped cache out of the index, in any order. Returns how many it took."""
        for taken in range(most):
            if not self._nodes:
                return taken
            _, (end, _, num_bytes) = self._nodes.popitem()
            self.index.take_out(end, num_bytes, self._bit)
        return most

    def _store(self, event: Stored) -> None:
        number, above, tokens = event.node, event.parent, event.tokens
        if not tokens or len(tokens) % self.index.page_bytes:
            raise ValueError(
                f"node {number} has {len(tokens)} bytes of tokens: not whole pages of {self.index.page_size} tokens"
            )
        if number in self._nodes:
            raise ValueError(f"node {number} is there already")
        end = self.index.store(self._known(above)[0], tokens, self._bit)
        if end is None:
            raise ValueError(f"node {above} already has a child that begins like node {number}")
        self._nodes[number] = (end, above, len(tokens))
        self._num_children[above] = self._num_children.get(above, 0) + 1
        self._num_bytes += len(tokens)

    def _split(self, event: Split) -> None:
        (end, above, num_bytes), at = self._known(event.node), event.at * TOKEN_BYTES
        if event.upper in self._nodes:
            raise ValueError(f"node {event.upper} is there already")
        if not 0 < at < num_bytes or at % self.index.page_bytes:
            raise ValueError(f"node {event.node} of {num_bytes // TOKEN_BYTES} tokens cannot be split at {event.at}")
        self._nodes[event.upper] = (self.index.ends_at(end, num_bytes - at), above, at)
        self._nodes[event.node] = (end, event.upper, num_bytes - at)
        self._num_children[event.upper] = 1

    def _remove(self, event: Removed) -> None:
        end, above, num_bytes = self._known(event.node)
        if event.node in self._num_children or not num_bytes:
            raise ValueError(f"node {event.node} is not a leaf")
        del self._nodes[event.node]
        left = self._num_children[above] - 1
        if left:
            self._num_children[above] = left
        else:
            del self._num_children[above]
        self._num_bytes -= num_bytes
        self.index.take_out(end, num_bytes, self._bit)

    def _change_checkpoint(self, event: Saved | Dropped) -> None:
        end, _, num_bytes = self._known(event.node)
        is_saved = isinstance(event, Saved)
        if self.index.has_checkpoint(end, self._bit) == is_saved or not (num_bytes or is_saved):
            raise ValueError(f"node {event.node} {'has a' if is_saved else 'has no'} checkpoint that can be changed")
        self.index.has_checkpoints = True
        if num_bytes:
            self.index.flip_checkpoint(end, self._bit)

    def _known(self, number: int) -> tuple[int, int, int]:
        if (node := self._nodes.get(number)) is None:
            raise ValueError(f"node {number} is not known")
        return node


class PrefixIndex:
    """The caches of all replicas with pages of one size."""

    def __init__(self, page_size: int) -> None:
        """Raises ValueError for a page size outside 1 .. 64 tokens."""
        if not 1 <= page_size <= 64:
            raise ValueError(f"page_size must be 1 to 64 tokens, not {page_size}")
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        # Of each node: its own tokens, its parent, the bits of the caches that have it, and its children by the first
        # page of their edges.
        self._edges: list[bytes] = [b""]
        self._parents: list[int] = [-1]
        self._holders: list[int] = [0]
        self._children: list[dict[bytes, int] | None] = [None]
        # Of models with recurrent states: by node, the bits of the caches with a checkpoint at its end; and whether any
        # cache has told a checkpoint. Then all are of such a model, and a prefix counts up to its deepest checkpoint.
        self._checkpoints: dict[int, int] = {}
        self.has_checkpoints = False
        self._unused: list[int] = []  # numbers of nodes that were removed
        self._live = 0  # bits of the caches that are not dropped
        self._free: list[int] = []  # slots
        self._dropped: deque[IndexedCache] = deque()
        self.num_slots = 0

    @property
    def num_nodes(self) -> int:
        """Nodes with a holder, or a dropped one that is still to be taken off."""
        return len(self._edges) - len(self._unused) - 1

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
        pages; with checkpoints, in the longest that can be continued. float64 [num_slots + 1], by slots. The last entry
        is 0, for a replica without a cache."""
        cached = np.zeros(self.num_slots + 1)
        if self.has_checkpoints:
            return self._match_checkpoints(prompt, cached)
        page_bytes, children, holders, end = self.page_bytes, self._children[ROOT], self._live, 0
        while children is not None and (child := children.get(prompt[end : end + page_bytes])) is not None:
            still = holders & self._holders[child]
            if still != holders:
                if end:
                    set_slots(cached, holders ^ still, end // TOKEN_BYTES)
                if not still:
                    return cached
                holders = still
            edge = self._edges[child]
            if not prompt.startswith(edge, end):
                end += common_bytes(prompt, end, edge, page_bytes)
                break
            children, end = self._children[child], end + len(edge)
        if end:
            set_slots(cached, holders, end // TOKEN_BYTES)
        return cached

    def _match_checkpoints(self, prompt: bytes, cached: NDArray[np.float64]) -> NDArray[np.float64]:
        """Writes into `cached`, zeros, where the deepest checkpoint of each replica is on the path of `prompt`."""
        page_bytes, children, holders, end = self.page_bytes, self._children[ROOT], self._live, 0
        while children is not None and (child := children.get(prompt[end : end + page_bytes])) is not None:
            holders &= self._holders[child]
            if not holders or not prompt.startswith(self._edges[child], end):
                break
            children, end = self._children[child], end + len(self._edges[child])
            if reached := holders & self._checkpoints.get(child, 0):
                set_slots(cached, reached, end // TOKEN_BYTES)
        return cached

    def has_checkpoint(self, node: int, bit: int) -> bool:
        """Whether the holder `bit` has a checkpoint at the end of `node`."""
        return bool(self._checkpoints.get(node, 0) & bit)

    def flip_checkpoint(self, node: int, bit: int) -> None:
        """Gives the holder `bit` a checkpoint at the end of `node`, or takes it away."""
        bits = self._checkpoints.get(node, 0) ^ bit
        if bits:
            self._checkpoints[node] = bits
        else:
            del self._checkpoints[node]

    def store(self, node: int, tokens: bytes, bit: int) -> int | None:
        """Gives the holder `bit` the path `tokens` below `node`, and returns where that ends. Returns None, and does
        nothing, if it has a path there that begins with the same page."""
        page_bytes, holders, at = self.page_bytes, self._holders, 0
        children = self._children[node]
        child = None if children is None else children.get(tokens[:page_bytes])
        if child is not None and holders[child] & bit:
            return None
        while child is not None:
            edge = self._edges[child]
            if not tokens.startswith(edge, at):
                child = self._split(child, common_bytes(tokens, at, edge, page_bytes))
                edge = self._edges[child]
            holders[child] |= bit
            node, at = child, at + len(edge)
            if at == len(tokens):
                return node
            children = self._children[node]
            child = None if children is None else children.get(tokens[at : at + page_bytes])
        return self._attach(node, tokens[at:] if at else tokens, bit)

    def ends_at(self, node: int, below: int) -> int:
        """The node that ends `below` bytes above the end of `node`; splits one for it if necessary."""
        while below >= (size := len(self._edges[node])):
            node, below = self._parents[node], below - size
        return self._split(node, size - below) if below else node

    def take_out(self, node: int, num_bytes: int, bit: int) -> None:
        """Takes `bit` off the nodes of the path of `num_bytes` that ends with `node`, with its checkpoint there, and
        removes those without a holder."""
        holders, children = self._holders, self._children
        if self.has_checkpoints and self.has_checkpoint(node, bit):
            self.flip_checkpoint(node, bit)
        while num_bytes:
            parent = self._parents[node]
            num_bytes -= len(self._edges[node])
            holders[node] ^= bit
            if not holders[node] and children[node] is None:
                self._detach(node, parent)
            node = parent
        # Dropped caches are taken out in any order, so that a parent may have lost its last holder before.
        while node != ROOT and not holders[node] and children[node] is None:
            parent = self._parents[node]
            self._detach(node, parent)
            node = parent

    def _attach(self, parent: int, edge: bytes, holders: int) -> int:
        if self._unused:
            node = self._unused.pop()
            self._edges[node], self._parents[node], self._holders[node] = edge, parent, holders
        else:
            node = len(self._edges)
            self._edges.append(edge)
            self._parents.append(parent)
            self._holders.append(holders)
            self._children.append(None)
        siblings = self._children[parent]
        if siblings is None:
            siblings = self._children[parent] = {}
        siblings[edge[: self.page_bytes]] = node
        return node

    def _detach(self, node: int, parent: int) -> None:
        siblings = self._children[parent]
        assert siblings is not None
        del siblings[self._edges[node][: self.page_bytes]]
        if not siblings:
            self._children[parent] = None
        self._edges[node] = b""
        self._unused.append(node)

    def _split(self, node: int, at: int) -> int:
        """Gives the first `at` bytes of `node` to a new node above it, and returns that. Where `node` ends is
        unchanged, so what refers to its end stays true."""
        edge = self._edges[node]
        upper = self._attach(self._parents[node], edge[:at], self._holders[node])  # in the place of `node`
        self._edges[node], self._parents[node] = edge[at:], upper
        self._children[upper] = {self._edges[node][: self.page_bytes]: node}
        return upper


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
