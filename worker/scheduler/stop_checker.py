"""Stop conditions: whether a sequence has had its last token."""

import numpy as np

from worker.messages import Output
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable


class StopChecker:
    """Stop tokens and length limits of all live sequences. One NumPy operation per step rules out most sequences."""

    def __init__(self, vocab_size: int) -> None:
        self._num_stopped_by = np.zeros(vocab_size, dtype=np.int32)  # how many sequences a token would end

    def add(self, seq: Sequence) -> None:
        """Adds a sequence's stop tokens."""
        for token_id in seq.stop_ids:
            self._num_stopped_by[token_id] += 1

    def remove(self, seq: Sequence) -> None:
        """Removes the stop tokens of a sequence that has ended."""
        for token_id in seq.stop_ids:
            self._num_stopped_by[token_id] -= 1

    def may_stop(self, table: SequenceTable[Sequence], rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Whether each sequence may have ended with its new token, bool [n]; False is certain, unless the sequence's
        grammar is complete. `rows`: int64 [n]. `token_ids`: integer [n], counted in the table already."""
        is_long = table.num_tokens[rows] - table.num_pending[rows] >= table.token_limit[rows]
        return is_long | (self._num_stopped_by[token_ids] > 0)

    @staticmethod
    def check(seq: Sequence, output: Output, is_complete: bool = False) -> None:
        """Sets the finish reason of `output` if the sequence's last token ends it. `is_complete`: its grammar is."""
        # A grammar is complete once it has accepted an end token, which it needs even if `ignore_eos` is set.
        if seq.last_token in seq.stop_ids or is_complete:
            output.finish_reason = "stop"
            output.stop_token_id = seq.last_token
        elif seq.num_known >= seq.token_limit:
            output.finish_reason = "length"
