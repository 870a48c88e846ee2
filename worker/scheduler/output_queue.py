"""The outputs of requests: made from sampled tokens, kept until they are taken."""

from collections.abc import Collection

import numpy as np

from worker.messages import Failure, Output, ReplicaLoad
from worker.scheduler.scheduled_step import ScheduledStep
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable
from worker.scheduler.stop_checker import StopChecker
from worker.step import SampledTokens


class OutputQueue:
    """Outputs in the order in which they were made."""

    def __init__(self, table: SequenceTable[Sequence], stop_checker: StopChecker) -> None:
        self._table = table
        self._stop_checker = stop_checker
        self._outputs: list[Output] = []
        self._num_tokens = 0  # output tokens since the start

    def __len__(self) -> int:
        return len(self._outputs)

    def take_outputs(self) -> list[Output]:
        """Returns the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def describe(self, load: ReplicaLoad) -> None:
        """Sets the counter of output tokens."""
        load.output_tokens = self._num_tokens

    def discard(self, request_ids: Collection[str]) -> None:
        """Removes the outputs of these requests."""
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]

    def add(self, output: Output) -> None:
        """Adds the last output of a request."""
        self._outputs.append(output)

    def add_failure(self, request_id: str, failure: Failure) -> None:
        """Adds the last output of a request that failed."""
        self.add(Output(request_id=request_id, finish_reason="error", failure=failure))

    def add_embedding(self, seq: Sequence, embedding: np.ndarray) -> None:
        """Adds the only output of a pooled request. `embedding`: float32 [hidden_size]."""
        output = Output(request_id=seq.request_id, finish_reason="stop", embedding=embedding.astype("<f4").tobytes())
        _announce(seq, output)
        self.add(output)

    def add_tokens(
        self, step: ScheduledStep, chosen: np.ndarray, sampled: SampledTokens, now_s: float
    ) -> list[Sequence]:
        """Appends the tokens of a step to its sequences, and adds an output for each. Returns the sequences that these
        tokens end. Arguments are as in `Scheduler.update`; `now_s` is the time by the scheduler's clock."""
        table = self._table
        kept, chunks, token_ids = np.arange(len(chosen)), chosen, sampled.token_ids
        if step.has_dropped:
            kept = (~step.dropped[chosen]).nonzero()[0]
            chunks, token_ids = chosen[kept], token_ids[kept]
        rows = step.rows[chunks]
        sequences = [step.sequences[chunk] for chunk in chunks.tolist()]
        outputs = []
        for seq, token_id in zip(sequences, token_ids.tolist(), strict=True):
            seq.new_token_ids.append(token_id)
            outputs.append(Output(request_id=seq.request_id, token_ids=[token_id]))
        self._num_tokens += len(outputs)
        table.num_pending[rows] -= 1
        table.last_token[rows] = token_ids.astype(np.int32)
        table.last_output_s[rows] = now_s
        if sampled.logprobs:
            for output, i in zip(outputs, kept.tolist(), strict=True):
                if i in sampled.logprobs:
                    output.logprobs = sampled.logprobs[i]
        is_new = ~table.announced[rows]
        if np.count_nonzero(is_new):
            for i in is_new.nonzero()[0].tolist():
                _announce(sequences[i], outputs[i])
            table.announced[rows] = True
        may_stop = self._stop_checker.may_stop(table, rows, token_ids)
        if sampled.complete:
            may_stop |= np.isin(kept, sampled.complete)
        if step.drafts:
            drafted = [(i, step.drafts[chunk]) for i, chunk in enumerate(chunks.tolist()) if chunk in step.drafts]
            may_stop[[i for i, _ in drafted]] = True
            following = [sampled.following.get(int(kept[i]), []) for i, _ in drafted]
            members = [(sequences[i], outputs[i], len(drafts)) for i, drafts in drafted]
            self._add_following(members, rows[[i for i, _ in drafted]], following)
        ended = []
        for i in may_stop.nonzero()[0].tolist():
            if outputs[i].finish_reason is None:
                self._stop_checker.check(sequences[i], outputs[i], int(kept[i]) in sampled.complete)
            if outputs[i].finish_reason is not None:
                ended.append(sequences[i])
        self._outputs += outputs
        return ended

    def _add_following(
        self, members: list[tuple[Sequence, Output, int]], rows: np.ndarray, following: list[list[int]]
    ) -> None:
        """Appends the tokens that follow each sequence's next one, up to one that ends it. Then the sequences' counters
        are as if these tokens had come one by one.

        - `members`: sequences with drafts, their outputs and their numbers of drafts.
        - `rows`: int64 [members], their table rows.
        - `following`: the tokens of each.
        """
        table = self._table
        known = (table.num_tokens[rows] - table.num_pending[rows]).tolist()
        limits, lasts = table.token_limit[rows].tolist(), table.last_token[rows].tolist()
        cut = []
        for n, ((seq, output, num_drafts), token_ids) in enumerate(zip(members, following, strict=True)):
            last, taken = lasts[n], 0
            for token_id in token_ids:
                if last in seq.stop_ids or known[n] + taken >= limits[n]:
                    cut.append(n)
                    break
                last, taken = token_id, taken + 1
            seq.new_token_ids += token_ids[:taken]
            output.token_ids += token_ids[:taken]
            output.logprobs = output.logprobs[: 1 + taken]
            output.num_drafted, output.num_accepted = num_drafts, len(token_ids)
            self._num_tokens += taken
            lasts[n] = last
            known[n] += taken
        table.last_token[rows] = lasts
        table.num_tokens[rows], table.num_pending[rows] = known, 0
        table.num_computed[rows] = table.num_confirmed[rows] = table.num_tokens[rows] - 1
        for n in cut:
            self._stop_checker.check(*members[n][:2])


def _announce(seq: Sequence, output: Output) -> None:
    """Sets the fields that only a sequence's first output has."""
    output.cached_tokens = seq.cached_tokens
    output.queue_s = (seq.started_s or seq.arrived_s) - seq.arrived_s
    output.prompt_logprobs = seq.prompt_logprobs
