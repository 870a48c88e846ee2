"""Checkpoints of recurrent states, as a component of a tree: a prefix can be continued where its states were saved.

A checkpoint is a copy of the states after the last token of a node, in a row of a tensor that the tree does not know. A
row is owned by exactly one of: the free list, a request, the tree.
"""

from collections.abc import Iterable

from radix.component import Component
from radix.integrity import check_rows
from radix.node import PagedNode


class StateComponent(Component[int]):
    """Checkpoints: the part of a node is the row with the states after its last token. The pool has the rows."""

    def check_part(self, num_tokens: int, part: int) -> None:
        if not 0 <= part < self.pool.num_pages:
            raise ValueError(f"{num_tokens} tokens with row {part}: insert what ends at a checkpoint, with its row")

    def save(self, node: PagedNode, part: int) -> None:
        super().save(node, part)
        self._use_little(node)

    def release(self, node: PagedNode) -> None:
        self.pool.free_one(self.parts[node])
        super().release(node)

    def matched(self, node: PagedNode) -> None:
        self._use_again(node)

    def check(self, held: Iterable[int], pins: Iterable[PagedNode]) -> None:
        check_rows(self, held)

    @property
    def _most_used_again(self) -> int:
        return self.pool.num_pages // 2
