"""What the running sequences lack before a step: for all of them in a few operations."""

from typing import NamedTuple

import numpy as np

from pipeline.policy import Horizon, View
from worker.counts import Counts


class Survey(NamedTuple):
    """Of the running sequences, by rank: their rows in the counts, the tokens that they lack, int32, and those that are
    computed; whether a part of the prompt is not computed or still in flight, whether they lack their last output and
    nothing else (`decode`), and whether they lack something else (`going`). `is_ending`: one lacks nothing any more."""

    rows: np.ndarray
    lacking: np.ndarray
    computed: np.ndarray
    in_prompt: np.ndarray
    decode: np.ndarray
    going: np.ndarray
    is_ending: bool

    @classmethod
    def of(cls, rows: np.ndarray, counts: Counts) -> "Survey":
        """As they are now."""
        tokens, computed = counts.tokens[rows], counts.computed[rows]
        unfinished = tokens < counts.limit[rows]
        in_prompt = counts.confirmed[rows] < counts.prompt[rows]
        lacking = tokens - computed
        decode = (lacking == 1) & unfinished & ~in_prompt
        is_ending = bool(np.count_nonzero(unfinished) < len(rows))
        return cls(rows, lacking, computed, in_prompt, decode, unfinished & ~decode, is_ending)

    def view(self, counts: Counts) -> View:
        """What a policy is told of them."""
        view = View(
            decoding=int(np.count_nonzero(self.decode)),
            decoding_context=int(np.add.reduce(self.computed[self.decode])),
        )
        if np.count_nonzero(self.going):
            computed, lacking = self.computed[self.going], self.lacking[self.going]
            in_flight = (computed >= counts.prompt[self.rows[self.going]]) & (lacking == 1)  # the last of their prompts
            view.decoding += int(np.count_nonzero(in_flight))
            view.decoding_context += int(computed[in_flight].sum())
            view.waiting = len(lacking) - int(np.count_nonzero(in_flight))
            view.waiting_tokens = int(lacking[~in_flight].sum())
        return view

    def horizon(self, counts: Counts, queue: np.ndarray) -> Horizon:
        """What is yet to come of them, and of those that wait, whose rows in the counts are `queue`."""
        rows = np.concatenate((self.rows, queue))
        missing = np.concatenate((np.where(self.going, self.lacking, 0), counts.tokens[queue] - counts.cached[queue]))
        to_come = np.maximum(counts.expected[rows] - counts.tokens[rows], 1)
        return Horizon.of(missing, to_come)
