"""A tree told to a new listener in pieces, while the tree changes between them.

The listener always knows a part of the tree that contains all ancestors of each node in it. Events of nodes whose
parents it knows are told as they happen (`SnapshotWalk.follows`). All other nodes come with a later piece, as they are
by then. So neither side stops for longer than a piece takes, however large the tree is.
"""

from collections.abc import Container

from radix.events import Event, Removed, Saved, Split, Stored
from radix.node import Node


class SnapshotWalk:
    """The way of one listener through a tree. All events of the tree from the walk's begin on must pass `follows`
    before the next piece is made."""

    def __init__(self, root: Node, checkpoints: Container[Node] | None = None) -> None:
        """`checkpoints`: the nodes that have one, as they are whenever a piece is made; None for a tree without
        any."""
        self._checkpoints = () if checkpoints is None else checkpoints
        self._first = [] if checkpoints is None else [Saved(root.number)]  # told before all nodes
        self._told = {root.number}
        # Nodes that were told, with those keys of their children that may not have been.
        self._open: list[tuple[Node, list[bytes]]] = [(root, list(root.children))]

    @property
    def is_done(self) -> bool:
        """Whether the whole tree has been told: from now on all events follow."""
        return not self._open and not self._first

    def follows(self, event: Event) -> bool:
        """Whether the listener must be told an event now."""
        told = self._told
        if isinstance(event, Stored):
            if event.parent in told:
                told.add(event.node)
                return True
        elif isinstance(event, Split):
            if event.node in told:
                told.add(event.upper)
                return True
        elif event.node in told:
            if isinstance(event, Removed):
                told.remove(event.node)
            return True
        return False

    def piece(self, most_nodes: int, most_bytes: int) -> list[Event]:
        """Events of nodes that were not told yet, parents before children: at most `most_nodes`, one more if the last
        tells a checkpoint, and no more after `most_bytes` of tokens. It looks at no more than four times as many
        children."""
        made: list[Event] = []
        if self._first and most_nodes > 0:
            made.append(self._first.pop())
        size, looks = 0, 4 * most_nodes
        while self._open and len(made) < most_nodes and size < most_bytes and looks:
            node, keys = self._open[-1]
            if not keys:
                self._open.pop()
                continue
            looks -= 1
            child = node.children.get(keys.pop())
            # It was removed, or told by an event. What is at a child's key after a split is a new node above it.
            if child is None or child.number in self._told:
                continue
            self._told.add(child.number)
            made.append(Stored(child.number, node.number, child.edge))
            if child in self._checkpoints:
                made.append(Saved(child.number))
            size += len(child.edge)
            if child.children:
                self._open.append((child, list(child.children)))
        while self._open and not self._open[-1][1]:
            self._open.pop()
        return made
