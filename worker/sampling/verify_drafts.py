"""The rows of logits of a step with drafts, and the comparison of drafts with samples.

A sequence with k drafts has k + 1 rows: the first after its last token, each further one after one more draft. Every
row is sampled as if its drafts were output, with the seed, penalties and mask of its position. A draft counts while the
sample before it is the same token. So the output is what steps of one token each would have given.
"""

import numpy as np


class DraftRows:
    """The sampled rows of one step, sequence after sequence.

    | attribute | meaning |
    | --- | --- |
    | `firsts` | the first row of each sequence, int64 [sequences] |
    | `offsets` | number of drafts before each row, int64 [rows] |
    """

    def __init__(self, draft_ids: np.ndarray) -> None:
        """`draft_ids`: int64 [rows], the draft that is to come after each row's sample; -1 at a sequence's last row."""
        self._draft_ids: list[int] = draft_ids.tolist()
        is_first = np.ones(len(draft_ids), dtype=bool)
        is_first[1:] = draft_ids[:-1] < 0
        self.firsts = np.flatnonzero(is_first)
        rows = np.arange(len(draft_ids))
        self.offsets = rows - np.maximum.accumulate(np.where(is_first, rows, 0))
        self._firsts: list[int] = self.firsts.tolist()
        self._ends = [*self._firsts[1:], len(draft_ids)]  # by sequence, the row after its last usable one

    def drafts(self, sequence: int) -> list[int]:
        """The drafts of a sequence."""
        return self._draft_ids[self._firsts[sequence] : self._ends[sequence] - 1]

    def cut(self, sequence: int, count: int) -> None:
        """Leaves a sequence only its first `count` rows, at least 1. The others have no valid logits or no mask."""
        self._ends[sequence] = min(self._ends[sequence], self._firsts[sequence] + max(1, count))

    def verified(self, sequence: int, token_ids: list[int]) -> list[int]:
        """The next tokens of a sequence, at least one. `token_ids`: the samples of all rows; below 0 for a row whose
        logits are not numbers."""
        first, end = self._firsts[sequence], self._ends[sequence]
        row = first
        while row + 1 < end and token_ids[row] == self._draft_ids[row] and token_ids[row + 1] >= 0:
            row += 1
        return token_ids[first : row + 1]
