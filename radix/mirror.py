"""A router's copy of a replica's tree: the same nodes without pages, updated by the events that the tree emits."""

from collections.abc import Sequence

import numpy as np

from radix.events import Event, Removed, Split, Stored
from radix.node import TOKEN_BYTES, Node, attach, descend, detach, insert_above, pack, snapshot, whole_pages


class Mirror:
    """A copy of one replica's tree, which says how much of a prompt the replica has cached."""

    def __init__(self, page_size: int) -> None:
        """Raises ValueError for a page size outside 1 .. 64."""
        if not 1 <= page_size <= 64:
            raise ValueError(f"page_size must be 1 to 64 tokens, not {page_size}")
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._root = Node(0, None, b"")
        self._nodes = {0: self._root}
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the replica has cached."""
        return self._num_tokens

    def apply(self, event: Event) -> None:
        """Applies one event. Raises ValueError if the event does not fit those before it. Then the mirror is no longer
        valid, and the listener must ask for a snapshot."""
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Split):
            self._split(event)
        else:
            self._remove(event)

    def match(self, tokens: Sequence[int] | np.ndarray) -> int:
        """Number of tokens in the longest cached prefix of `tokens`, in whole pages. Changes nothing."""
        return self.match_packed(pack(tokens))

    def match_packed(self, prompt: bytes) -> int:
        """Like `match`, for a prompt that `radix.node.pack` has packed: a caller with many mirrors packs it once."""
        if self._root.children:
            return descend(self._root, whole_pages(prompt, self._page_bytes), self._page_bytes)[2] // TOKEN_BYTES
        return 0

    def snapshot(self) -> list[Stored]:
        """Events that build this mirror from an empty one, parents before children."""
        return snapshot(self._root)

    def _store(self, event: Stored) -> None:
        if not event.tokens or len(event.tokens) % self.page_size:
            raise ValueError(f"node {event.node} has {len(event.tokens)} tokens: not whole pages of {self.page_size}")
        self._require_new(event.node)
        node = Node(event.node, self._known(event.parent), pack(event.tokens))
        attach(node, self._page_bytes)
        self._nodes[event.node] = node
        self._num_tokens += len(event.tokens)

    def _split(self, event: Split) -> None:
        node = self._known(event.node)
        self._require_new(event.upper)
        if not 0 < event.at < node.num_tokens or event.at % self.page_size:
            raise ValueError(f"node {event.node} of {node.num_tokens} tokens cannot be split at {event.at}")
        self._nodes[event.upper] = insert_above(node, event.upper, event.at * TOKEN_BYTES, self._page_bytes)

    def _remove(self, event: Removed) -> None:
        node = self._known(event.node)
        if node.children or node is self._root:
            raise ValueError(f"node {event.node} is no leaf")
        detach(node, self._page_bytes)
        del self._nodes[event.node]
        self._num_tokens -= node.num_tokens

    def _known(self, number: int) -> Node:
        if (node := self._nodes.get(number)) is None:
            raise ValueError(f"node {number} is not known")
        return node

    def _require_new(self, number: int) -> None:
        if number in self._nodes:
            raise ValueError(f"node {number} is there already")
