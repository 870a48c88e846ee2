"""The checkpoints of recurrent states that one running sequence begins with and saves."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceCheckpoints:
    """The checkpoints of a running sequence.

    - `read`: row of the states that its first chunk begins with, until that is planned; -1 for none.
    - `targets`: positions in its prompt that no plan has reached, ascending.
    - `saved`: positions and rows that plans write and that the tree has not got yet. The rows are the sequence's.
    """

    read: int
    targets: list[int]
    saved: list[tuple[int, int]] = field(default_factory=list)
