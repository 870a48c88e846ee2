"""When a sequence has had its last token."""

import numpy as np

from worker.counts import Counts
from worker.messages import Output
from worker.request import Sequence


class Ends:
    """Knows which tokens end whom. Of the hundreds that come in a step nothing ends most, which one look says."""

    def __init__(self, vocab_size: int) -> None:
        self._num_stopped_by = np.zeros(vocab_size, dtype=np.int32)  # how many sequences a token would end

    def add(self, seq: Sequence) -> None:
        """From now on its tokens are looked at."""
        for token_id in seq.stop_ids:
            self._num_stopped_by[token_id] += 1

    def remove(self, seq: Sequence) -> None:
        """It has ended."""
        for token_id in seq.stop_ids:
            self._num_stopped_by[token_id] -= 1

    def may_end(self, counts: Counts, rows: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Whether the sequences of `rows` may have ended with these tokens, which are counted already: bool. False is
        for sure, but for a grammar that is complete."""
        is_long = counts.tokens[rows] - counts.pending[rows] >= counts.limit[rows]
        return is_long | (self._num_stopped_by[token_ids] > 0)

    @staticmethod
    def judge(seq: Sequence, output: Output, is_complete: bool = False) -> None:
        """Writes into `output` whether the sequence's last token ends it, maybe because its grammar `is_complete`."""
        # A grammar is complete when it has taken an end token: it needs one even where `ignore_eos` is set.
        if seq.last_token in seq.stop_ids or is_complete:
            output.finish_reason = "stop"
            output.stop_token_id = seq.last_token
        elif seq.num_known >= seq.token_limit:
            output.finish_reason = "length"
