"""From logits to tokens: penalties, biases, grammars, temperature and filters for a batch of rows with different needs.

The token of a row depends on that row's logits, parameters, history and seed, and on nothing else in the batch.

`launch` queues all work on the device and does not wait for it. `result` waits, and updates the state that depends on
the tokens' values. On a CPU the same steps run at once, with `worker.sampling.topk_topp_cpu` in place of
`worker.sampling.topk_topp`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from kernels.host_device import PinnedBuffer, PinnedRing, all_to_device
from worker.messages import Failure, SamplingParams
from worker.sampling import topk_topp
from worker.sampling.logits_processors import apply_logits_adjustments
from worker.sampling.logprobs import PendingLogprobs
from worker.sampling.sampling_metadata import SamplingMetadata, SamplingNeeds, SlotState, append_tokens
from worker.sampling.token_bitmask import TokenBitmask
from worker.sampling.topk_topp_cpu import draw, uniform
from worker.sampling.verify_drafts import DraftRows
from worker.step import PROMPT_LOGIT_ROWS, SampledTokens
from worker.structured_output import GrammarError, GrammarState, GrammarThreads, apply_bitmask


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
    ) -> None:
        """`tokens`: int64, one for each row of logits. They are copied to the host, into `landing`. `threads`: those of
        grammars. If the rows have `drafts`: `owners` are the states of its sequences, and `count` is told of each slot
        that got more than one token."""
        self._drafts, self._owners, self._count = drafts, owners, count
        self._metadata = metadata
        self._logprobs = logprobs
        self._failures, self._threads = failures, threads
        self._landing = landing
        self._tokens = landing.array[: tokens.nbytes].view(np.int64)
        landing.bytes_[: tokens.nbytes].view(tokens.dtype).copy_(tokens, non_blocking=True)
        landing.begun()

    def result(self) -> SampledTokens:
        """Waits for the device, and lets the slots' states take in their tokens. To be called once."""
        self._landing.wait()
        metadata, failures = self._metadata, self._failures
        token_ids = self._tokens[metadata.sampled_rows]
        if self._drafts is not None:
            return self._verify(token_ids, self._drafts)
        for i in (token_ids < 0).nonzero()[0].tolist():
            failures.setdefault(i, Failure("internal", "the model's output is not a number"))
        rows = {i: row for i, row in metadata.stateful if i not in failures}
        said = token_ids.tolist()
        _, errors = append_tokens(rows, {i: [said[i]] for i in rows}, self._threads)
        failures |= {i: _taken_wrongly(error) for i, error in errors.items()}
        complete = [i for i, row in rows.items() if row.is_complete]
        logprobs = {}
        if self._logprobs is not None:
            found = zip(metadata.logprobs, self._logprobs.result(), strict=True)
            logprobs = {i: [logprobs] for i, logprobs in found if i not in failures}
        return SampledTokens(token_ids, logprobs, failures, complete)

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


class Sampler:
    """Chooses the next token of every running sequence. Keeps the state that this depends on, by slot."""

    def __init__(
        self,
        max_running: int,
        vocab_size: int,
        device: torch.device | str,
        last_tokens: torch.Tensor | None = None,
    ) -> None:
        """Slots are 0 to `max_running` - 1. Logits have `vocab_size` columns and lie on `device`. `last_tokens`, int64
        on `device` with an element for each slot, receives the slot's token as soon as the device has chosen it."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.last_tokens = last_tokens
        self._states: list[SlotState | None] = [None] * max_running
        self._needs = np.full(max_running, SamplingNeeds.FREE, dtype=np.int64)
        self._masks: TokenBitmask | None = None
        self._threads = GrammarThreads()
        self._metadata: SamplingMetadata | None = None
        self._landings = PinnedRing(self.device, 8 * (max_running + PROMPT_LOGIT_ROWS))
        # Parameters of random draws, by slot.
        self._seeds = np.zeros(max_running, dtype=np.uint64)
        self._num_output = np.zeros(max_running, dtype=np.int64)
        self._temperature = np.ones(max_running, dtype=np.float32)
        self._top_k = np.zeros(max_running, dtype=np.int32)
        self._top_p = np.ones(max_running, dtype=np.float64)
        self._min_p = np.zeros(max_running, dtype=np.float64)

    def add(
        self,
        slot: int,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        eos_token_ids: Iterable[int],
        grammar: GrammarState | None,
    ) -> None:
        """Puts a new or resumed sequence into `slot`. `output_ids` are its output so far. `grammar` accepts now those
        of them that it has not accepted yet.

        Raises ValueError for a slot in use or a token id outside the vocabulary, and GrammarError if the output so far
        does not match the grammar. The slot then stays free.
        """
        if self._states[slot] is not None:
            raise ValueError(f"slot {slot} is in use")
        named = sampling.logit_bias, sampling.stop_token_ids, sampling.allowed_token_ids, *sampling.bad_words
        for token_id in chain.from_iterable(named):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        if grammar is not None:
            for token_id in output_ids[grammar.num_tokens :]:
                grammar.accept(token_id)
        row = SlotState(sampling, prompt_ids, output_ids, eos_token_ids, grammar)
        self._states[slot], self._needs[slot] = row, row.needs
        self._metadata = None
        seed = int.from_bytes(os.urandom(8)) >> 1 if sampling.seed is None else sampling.seed % 2**64
        self._seeds[slot] = seed
        self._num_output[slot] = len(output_ids)
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = min(sampling.top_k, self.vocab_size)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p

    def remove(self, slot: int) -> None:
        """Frees a slot. A slot that is free stays free."""
        self._states[slot], self._needs[slot] = None, SamplingNeeds.FREE
        self._metadata = None

    def launch(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        likeliest: torch.Tensor | None = None,
        draft_ids: np.ndarray | None = None,
    ) -> PendingSample:
        """Begins to choose the next token of each slot. Take the `result` of one launch before the next launch.

        - `logits`: float32[n, vocab_size], row i for `slots[i]`. They are not modified. Work that is queued on the
          device afterwards may overwrite them.
        - `slots`: int64[n], -1 for a row without a sequence.
        - `likeliest`: the argmax of each row, if known already (as `kernels.ops.argmax` returns it). `last_tokens` must
          then hold these tokens.
        - `draft_ids`: int64[n], the draft that is to come after each row's token, or -1. The rows of a slot follow each
          other, and all but the last have a draft. The result has all tokens up to the first that is not its draft,
          that one included. None in a step without drafts.

        A row that gets no token (logits that are not numbers, a grammar that allows none) is among the `failures` of
        the result. The other rows are unaffected.
        """
        drafts, owners = None, list[SlotState]()
        metadata = self._metadata
        if draft_ids is not None:
            drafts = DraftRows(draft_ids[slots >= 0])
            owners, after = self._after_drafts(drafts, slots[slots >= 0])
            metadata = SamplingMetadata(slots, self._needs, self._states, self.device, after)
        elif metadata is None or metadata.key.tobytes() != slots.tobytes():  # several times as fast as `array_equal`
            metadata = self._metadata = SamplingMetadata(slots, self._needs, self._states, self.device)
        plain = tokens = _likeliest(logits) if likeliest is None else likeliest
        failures: dict[int, Failure] = {}
        if metadata.constrained or metadata.custom:
            masks = self._fill_masks(metadata, failures, drafts, owners)
            if metadata.constrained:
                assert masks is not None
                chosen = _likeliest_allowed(logits, metadata.on_device.constrained, masks[: len(metadata.constrained)])
                tokens = tokens.index_copy(0, metadata.on_device.constrained, chosen)
            if metadata.custom:
                masks = None if masks is None else masks[len(metadata.constrained) :]
                chosen = self._choose(logits, metadata, masks, drafts)
                tokens = tokens.index_copy(0, metadata.on_device.custom, chosen)
            tokens = torch.where(plain < 0, -1, tokens)
        if likeliest is None:
            self._keep(tokens, metadata.on_device.sampled_rows, metadata.on_device.slots)
        elif metadata.constrained or metadata.custom:
            self._keep(tokens, metadata.on_device.others, metadata.on_device.other_slots)
        logprobs = None
        if metadata.logprobs:
            rows = metadata.on_device.logprobs
            top = [row.params.logprobs or 0 for row in metadata.logprob_states]
            logprobs = PendingLogprobs(logits.index_select(0, rows), tokens.index_select(0, rows).clamp_(min=0), top)
        self._count(metadata)
        landing = self._landings.next()
        count = self._count_following
        return PendingSample(metadata, tokens, landing, logprobs, failures, self._threads, drafts, owners, count)

    def _after_drafts(self, drafts: DraftRows, slots: np.ndarray) -> tuple[list[SlotState], dict[int, SlotState]]:
        """The state of each sequence, and the states of the rows that come after drafts. `slots`: int64 [sampled
        rows]. Raises ValueError for a slot that is free."""
        owners, states = [], {}
        for i, first in enumerate(drafts.firsts.tolist()):
            slot = int(slots[first])
            state, num_output = self._states[slot], int(self._num_output[slot])
            if state is None:
                raise ValueError(f"slot {slot} is free")
            owners.append(state)
            for number, token_id in enumerate(drafts.drafts(i), 1):
                state = states[first + number] = state.after(token_id, num_output + number)
        return owners, states

    def _keep(self, tokens: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores the tokens of these rows as the last ones of their slots."""
        if self.last_tokens is not None:
            self.last_tokens.index_copy_(0, slots, tokens.index_select(0, rows).clamp_(min=0))

    def _count(self, metadata: SamplingMetadata) -> None:
        """Counts this launch's tokens as output, before their values are known. Lifts bans that end with them."""
        self._num_output[metadata.slots] += 1  # once for a slot with several rows
        for slot in metadata.min_tokens_slots:
            self._lift_bans(slot)

    def _count_following(self, slot: int, state: SlotState, count: int) -> None:
        """Counts `count` more tokens as output of a slot: drafts that were right. `state`: the slot's when the step was
        launched; by now the slot may have another owner."""
        if self._states[slot] is state:
            self._num_output[slot] += count
            self._lift_bans(slot)

    def _lift_bans(self, slot: int) -> None:
        """Allows end tokens again once there are `min_tokens`."""
        row = self._states[slot]
        if row is not None and row.suppressed is not None and self._num_output[slot] >= row.params.min_tokens:
            row.suppressed = None
            self._needs[slot] = row.needs
            self._metadata = None

    def _fill_masks(
        self,
        metadata: SamplingMetadata,
        failures: dict[int, Failure],
        drafts: DraftRows | None,
        owners: Sequence[SlotState],
    ) -> torch.Tensor | None:
        """Masks of all grammars, on the device: first of the `constrained` rows, then of the `custom` rows. The masks
        of `custom` rows without a grammar are not filled. None if no row has a grammar. Rows whose grammar allows no
        token are added to `failures`."""
        rows = metadata.constrained_states + metadata.custom_states
        positions = metadata.constrained + metadata.custom
        states = [(i, row.grammar) for i, row in enumerate(rows) if row.grammar is not None]
        if not states:
            return None
        if self._masks is None:
            self._masks = TokenBitmask(
                len(self._states) + PROMPT_LOGIT_ROWS, self.vocab_size, self.device, self._threads
            )
        if drafts is not None:
            states = [(i, state) for i, state in states if not drafts.offsets[positions[i]]]
        for i, error in self._masks.fill([state for _, state in states], [i for i, _ in states]).items():
            number, state = states[i]
            failures[positions[number]] = Failure("invalid", str(error), state.param)
        if drafts is not None:
            self._fill_after_drafts(self._masks, drafts, owners, {at: i for i, at in enumerate(positions)})
        return self._masks.on_device(len(rows))

    @staticmethod
    def _fill_after_drafts(
        masks: TokenBitmask, drafts: DraftRows, owners: Sequence[SlotState], row_of: Mapping[int, int]
    ) -> None:
        """Fills the masks of the rows after drafts. `row_of`: a sampled row's mask."""
        guided = [i for i, owner in enumerate(owners) if owner.grammar is not None and drafts.drafts(i)]
        states = [grammar for i in guided if (grammar := owners[i].grammar) is not None]
        token_ids, firsts = [drafts.drafts(i) for i in guided], drafts.firsts.tolist()
        rows = [
            [row_of[firsts[i] + number] for number in range(1, len(ids) + 1)]
            for i, ids in zip(guided, token_ids, strict=True)
        ]
        for i, count in zip(guided, masks.fill_after(states, token_ids, rows), strict=True):
            drafts.cut(i, 1 + count)

    def _choose(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        masks: torch.Tensor | None,
        drafts: DraftRows | None,
    ) -> torch.Tensor:
        """Tokens, int64, of the `custom` rows. `masks` has a row for each, None without grammars."""
        work = logits.index_select(0, metadata.on_device.custom)
        if metadata.is_adjusted:
            apply_logits_adjustments(work, range(len(work)), [row.adjustments for row in metadata.custom_states])
        if masks is not None and len(metadata.masked):
            all_masked = len(metadata.masked) == len(work)
            apply_bitmask(work, masks, None if all_masked else metadata.on_device.masked)
        if len(metadata.greedy) == len(work):
            return _likeliest(work)
        tokens = torch.zeros(len(work), dtype=torch.int64, device=work.device)
        if len(metadata.greedy):
            tokens.index_copy_(
                0, metadata.on_device.greedy, _likeliest(work.index_select(0, metadata.on_device.greedy))
            )
        for positions, at in (
            (metadata.unfiltered, metadata.on_device.unfiltered),
            (metadata.filtered, metadata.on_device.filtered),
        ):
            if len(positions):
                some = work if len(positions) == len(work) else work.index_select(0, at)
                ahead = 0 if drafts is None else drafts.offsets[metadata.custom][positions]
                tokens.index_copy_(0, at, self._draw(some, metadata.custom_slots[positions], ahead))
        return tokens

    def _draw(self, logits: torch.Tensor, slots: np.ndarray, ahead: np.ndarray | int) -> torch.Tensor:
        """Random tokens, int64[n]: row i is drawn with the seed, temperature and filters of `slots[i]`, as the output
        that comes `ahead[i]` after the slot's next one."""
        uniforms = uniform(self._seeds[slots], (self._num_output[slots] + ahead).astype(np.uint64))
        temperature, top_k = self._temperature[slots], self._top_k[slots]
        top_p, min_p = self._top_p[slots], self._min_p[slots]
        if logits.device.type == "cpu":
            probs = torch.softmax(logits / torch.from_numpy(temperature)[:, None], dim=1).numpy()
            # NaN: no token is possible, or the logits are not numbers. The row has failed, or will when its grammar
            # gets the token.
            probs[np.isnan(probs[:, 0])] = 1.0 / probs.shape[1]
            return torch.from_numpy(draw(probs, top_k, top_p, min_p, uniforms))
        top_k = np.where(top_k > 0, top_k, self.vocab_size).astype(np.int32)
        arrays = [temperature[:, None], top_k, top_p.astype(np.float32), min_p.astype(np.float32), uniforms]
        divisor, *limits, uniforms_at = all_to_device(arrays, logits.device)
        asked = [(top_k < self.vocab_size).any(), (top_p < 1).any(), (min_p > 0).any()]
        filters = topk_topp.Filters(*(limit if some else None for limit, some in zip(limits, asked, strict=True)))
        return topk_topp.draw(torch.softmax(logits / divisor, dim=1), filters, uniforms_at)


def _taken_wrongly(error: GrammarError) -> Failure:
    return Failure("internal", f"a token was taken that must not be: {error}")


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """`kernels.ops.argmax.greedy_argmax` on any device: the first of the largest logits of each row, int64, or -1 if
    the largest is not finite. On a CPU NumPy does this, 13 times as fast as PyTorch."""
    if logits.device.type == "cpu":
        values = logits.numpy()
        tokens = values.argmax(axis=1)
        tokens[~np.isfinite(values[np.arange(len(tokens)), tokens])] = -1
        return torch.from_numpy(tokens)
    from kernels.ops.argmax import greedy_argmax

    return greedy_argmax(logits)


def _likeliest_allowed(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """`_likeliest`, int64, of these rows of logits, among the tokens that each row's mask allows."""
    if logits.device.type == "cpu":
        work = logits.index_select(0, rows)
        apply_bitmask(work, masks)
        return _likeliest(work)
    from kernels.ops.argmax import greedy_argmax

    return greedy_argmax(logits, rows, masks)
