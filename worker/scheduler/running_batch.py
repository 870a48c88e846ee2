"""The running sequences before a step, by what remains to be computed; all of them in a few NumPy operations."""

from typing import NamedTuple

import numpy as np

from pipeline.policy import Horizon, SchedulerView
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable


class RunningBatch(NamedTuple):
    """The running sequences before a step, one entry per sequence, by rank.

    | field | dtype | meaning |
    | --- | --- | --- |
    | `rows` | int64 | row in the `SequenceTable` |
    | `remaining` | int32 | remaining tokens that no step holds |
    | `computed` | int32 | tokens that are computed, or in flight |
    | `in_prompt` | bool | a part of the prompt is not computed, or still in flight |
    | `decode` | bool | one token remains, and the prompt is computed |
    | `chunked` | bool | other tokens remain: prefills, and sequences whose last prompt chunk is in flight |

    `is_ending`: a sequence has as many tokens as it may have, so that it ends with a step in flight.
    """

    rows: np.ndarray
    remaining: np.ndarray
    computed: np.ndarray
    in_prompt: np.ndarray
    decode: np.ndarray
    chunked: np.ndarray
    is_ending: bool

    @classmethod
    def classify(cls, rows: np.ndarray, table: SequenceTable[Sequence]) -> "RunningBatch":
        """The state of the sequences of `rows`, int64, by rank."""
        tokens, computed = table.num_tokens[rows], table.num_computed[rows]
        unfinished = tokens < table.token_limit[rows]
        in_prompt = table.num_confirmed[rows] < table.num_prompt[rows]
        remaining = tokens - computed
        decode = (remaining == 1) & unfinished & ~in_prompt
        is_ending = bool(np.count_nonzero(unfinished) < len(rows))
        return cls(rows, remaining, computed, in_prompt, decode, unfinished & ~decode, is_ending)

    def view(self, table: SequenceTable[Sequence]) -> SchedulerView:
        """The part of the policy's view that describes running sequences."""
        view = SchedulerView(
            decoding=int(np.count_nonzero(self.decode)),
            decoding_context=int(np.add.reduce(self.computed[self.decode])),
        )
        if np.count_nonzero(self.chunked):
            computed, remaining = self.computed[self.chunked], self.remaining[self.chunked]
            # The last chunk of the prompt is in flight.
            in_flight = (computed >= table.num_prompt[self.rows[self.chunked]]) & (remaining == 1)
            view.decoding += int(np.count_nonzero(in_flight))
            view.decoding_context += int(computed[in_flight].sum())
            view.waiting = len(remaining) - int(np.count_nonzero(in_flight))
            view.waiting_tokens = int(remaining[~in_flight].sum())
        return view

    def horizon(self, table: SequenceTable[Sequence], queue: np.ndarray) -> Horizon:
        """The horizon of the running sequences and of the waiting ones, whose table rows are `queue`, int64."""
        rows = np.concatenate((self.rows, queue))
        missing = np.concatenate(
            (np.where(self.chunked, self.remaining, 0), table.num_tokens[queue] - table.cached_estimate[queue])
        )
        to_come = np.maximum(table.expected_tokens[rows] - table.num_tokens[rows], 1)
        return Horizon.from_lengths(missing, to_come)
