"""The tokens of a launch, on their way to the host: what becomes of them there."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from kernels.host_device import PinnedBuffer
from worker.messages import Failure
from worker.sampling.draft_rows import DraftRows
from worker.sampling.early_masks import EarlyMasks
from worker.sampling.logprobs import PendingLogprobs
from worker.sampling.sampling_metadata import SamplingMetadata, SlotState, append_tokens
from worker.step import SampledTokens
from worker.structured_output import GrammarError, GrammarThreads


class PendingSample:
    """The tokens of one batch, on their way to the host."""

    def __init__(
        self,
        metadata: SamplingMetadata,
        tokens: torch.Tensor,
        landing: PinnedBuffer,
        logprobs: PendingLogprobs | None,
        failures: dict[int, Failure],
        threads: GrammarThreads,
        drafts: DraftRows | None = None,
        owners: Sequence[SlotState] = (),
        count: Callable[[int, SlotState, int], None] | None = None,
        early: EarlyMasks | None = None,
    ) -> None:
        """`tokens`: int64, one for each row of logits. They are copied to the host, into `landing`. `threads`: those of
        grammars. If the rows have `drafts`: `owners` are the states of its sequences, and `count` is told of each slot
        that got more than one token. `early`: what `begin` needs; None if it is to do nothing."""
        self._drafts, self._owners, self._count = drafts, owners, count
        self._early = early
        # As they are now: a slot may lose its row before `begin` is called. Then no one uses what is written there.
        self._mask_rows: list[int] = [] if early is None else early.rows(metadata.slots).tolist()
        self._taken_in: Future[tuple[np.ndarray, dict[int, GrammarError]]] | None = None
        self._metadata = metadata
        self._logprobs = logprobs
        self._failures, self._threads = failures, threads
        self._landing = landing
        self._tokens = landing.array[: tokens.nbytes].view(np.int64)
        landing.bytes_[: tokens.nbytes].view(tokens.dtype).copy_(tokens, non_blocking=True)
        landing.begun()

    def begin(self) -> None:
        """Lets a thread take in the tokens when they have come, and fill the masks after them. From now until the next
        launch, or `settle`, nothing else may use the grammars of the slots."""
        if self._early is not None:
            self._taken_in = Future()
            self._early.submit(partial(self._take_in_early, self._early, self._taken_in))

    def settle(self) -> None:
        """Waits until the thread is done with the masks too. Raises what went wrong there."""
        if self._early is not None:
            self._early.settle()

    def result(self) -> SampledTokens:
        """Waits for the device, and lets the slots' states take in their tokens. To be called once."""
        metadata, failures = self._metadata, self._failures
        if self._drafts is not None:
            return self._verify(self._landed(), self._drafts)
        token_ids, errors = self._take_in() if self._taken_in is None else self._taken_in.result()
        for i in (token_ids < 0).nonzero()[0].tolist():
            failures.setdefault(i, Failure("internal", "the model's output is not a number"))
        complete = [i for i, row in metadata.stateful if row.is_complete and i not in failures and i not in errors]
        failures |= {i: _taken_wrongly(error) for i, error in errors.items()}
        logprobs = {}
        if self._logprobs is not None:
            found = zip(metadata.logprobs, self._logprobs.result(), strict=True)
            logprobs = {i: [logprobs] for i, logprobs in found if i not in failures}
        return SampledTokens(token_ids, logprobs, failures, complete)

    def _landed(self) -> np.ndarray:
        """Waits for the device. Returns the tokens, int64 [sampled rows]; -1 where the logits are not numbers."""
        self._landing.wait()
        return self._tokens[self._metadata.sampled_rows]

    def _take_in(self) -> tuple[np.ndarray, dict[int, GrammarError]]:
        """Lets the slots' states take in their tokens. Returns the tokens, as `_landed`, and errors by row."""
        token_ids = self._landed()
        said = token_ids.tolist()
        rows = {i: row for i, row in self._metadata.stateful if i not in self._failures and said[i] >= 0}
        _, errors = append_tokens(rows, {i: [said[i]] for i in rows}, self._threads)
        return token_ids, errors

    def _take_in_early(self, early: EarlyMasks, taken_in: "Future[tuple[np.ndarray, dict[int, GrammarError]]]") -> None:
        """Sets `taken_in` to what `_take_in` returns or raises. Then fills the masks of the outputs that go on, while
        `result` and the scheduler do their part."""
        try:
            token_ids, errors = self._take_in()
        except BaseException as error:
            taken_in.set_exception(error)
            return
        going = [
            (row.grammar, self._mask_rows[i])
            for i, row in self._metadata.stateful
            if row.grammar is not None and not row.grammar.terminated and i not in errors and i not in self._failures
        ]
        taken_in.set_result((token_ids, errors))
        early.fill([grammar for grammar, _ in going], [at for _, at in going])

    def _verify(self, token_ids: np.ndarray, drafts: DraftRows) -> SampledTokens:
        """As `result`, with drafts: by sequence instead of by row. `token_ids`: int64 [sampled rows]."""
        metadata, failures, complete = self._metadata, {}, []
        following, logprobs = {}, {}
        by_row = {}
        if self._logprobs is not None:
            by_row = dict(zip(metadata.logprobs, self._logprobs.result(), strict=True))
        said, slots, firsts = token_ids.tolist(), metadata.slots.tolist(), drafts.firsts.tolist()
        verified = {}
        for i, first in enumerate(firsts):
            tokens = drafts.verified(i, said)
            if first in self._failures:
                failures[i] = self._failures[first]
            elif tokens[0] < 0:
                failures[i] = Failure("internal", "the model's output is not a number")
            else:
                verified[i] = tokens
        taken, errors = append_tokens({i: self._owners[i] for i in verified}, verified, self._threads)
        failures |= {i: _taken_wrongly(error) for i, error in errors.items()}
        for i, tokens in taken.items():
            if i in errors:
                continue
            owner, first = self._owners[i], firsts[i]
            if owner.is_complete:
                complete.append(i)
            if len(tokens) > 1:
                following[i] = tokens[1:]
                assert self._count is not None
                self._count(slots[first], owner, len(tokens) - 1)
            if first in by_row:
                logprobs[i] = [by_row[first + number] for number in range(len(tokens))]
        return SampledTokens(token_ids[drafts.firsts], logprobs, failures, complete, following)


def _taken_wrongly(error: GrammarError) -> Failure:
    return Failure("internal", f"a token was taken that must not be: {error}")
