"""From logits to tokens: penalties, biases, grammars, temperature and filters for a batch whose rows want different
things. What a row gets depends on its own logits, parameters, history and seed, and on nothing else in the batch.

`launch` puts all the work on the device and does not wait for it; what depends on the tokens is counted in `result`. On
a CPU the same steps run at once, with `worker.draw` in place of `worker.device_draw`.
"""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.transfer import all_to_device, to_host
from worker import device_draw
from worker.draw import draw, uniform
from worker.edits import Edits, History, apply_edits
from worker.grammar import GrammarError, GrammarState, apply_bitmask, new_bitmask
from worker.logprobs import PendingLogprobs
from worker.messages import Failure, SamplingParams, TokenLogprobs

# Below this temperature the likeliest token is taken: it is what the division leaves, without overflow.
_GREEDY_BELOW = 1e-5


class SampledTokens(NamedTuple):
    """What those rows of a launch got that are somebody's: their next tokens, int64 `[n]`, and by a row's place among
    them the log probabilities that were asked for; the failures, which are the row's alone and leave it without a
    token; and whose grammar is complete with this token."""

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, Failure]
    complete: list[int]


class _Row:
    """A slot's parameters and history."""

    __slots__ = ("bans", "bias", "grammar", "greedy", "history", "params")

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        eos_token_ids: Iterable[int],
        grammar: GrammarState | None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.greedy = params.temperature < _GREEDY_BELOW
        repeats = params.repetition_penalty != 1
        self.history: History | None = None
        if repeats or params.presence_penalty or params.frequency_penalty:
            self.history = History(prompt_ids if repeats else (), output_ids)
        self.bans: np.ndarray | None = None
        if params.min_tokens > len(output_ids):
            self.bans = np.array(sorted({*eos_token_ids, *params.stop_token_ids}), dtype=np.int64)
        self.bias: tuple[np.ndarray, np.ndarray] | None = None
        if params.logit_bias:
            ids = np.array(list(params.logit_bias), dtype=np.int64)
            self.bias = ids, np.array(list(params.logit_bias.values()), dtype=np.float32)

    @property
    def edited(self) -> bool:
        """Whether single logits change."""
        return self.history is not None or self.bans is not None or self.bias is not None

    @property
    def learns(self) -> bool:
        """Whether its next token depends on this one by more than the model."""
        return self.history is not None or self.grammar is not None

    @property
    def is_complete(self) -> bool:
        """Whether its grammar has taken an end token."""
        return self.grammar is not None and self.grammar.terminated

    def take(self, token_id: int) -> None:
        """Counts a token. Raises GrammarError if the grammar does not allow it."""
        if self.history is not None:
            self.history.add(token_id, 1)
        if self.grammar is not None:
            self.grammar.accept(token_id)


class _Layout:
    """Who is where in a batch, for as long as the same slots come in the same order and want the same.

    `wanted` are the rows of logits that get a token, int64 on the device, None if all do; `slots` theirs. `special` are
    those rows of logits that want more than the likeliest token; of these, by their place among them, `greedy` take
    the likeliest of what is left, `free` draw from the whole distribution and `filtered` from a part.
    """

    def __init__(self, slots: np.ndarray, rows: list[_Row | None], device: torch.device) -> None:
        self.key = slots
        wanted = np.flatnonzero(slots >= 0)
        self.slots = slots[wanted]
        self.rows: list[_Row] = []
        for slot in self.slots.tolist():
            row = rows[slot]
            if row is None:
                raise ValueError(f"slot {slot} is free")
            self.rows.append(row)
        plain = [row.greedy and not row.edited and row.grammar is None for row in self.rows]
        special = [i for i, is_plain in enumerate(plain) if not is_plain]
        self.special = [self.rows[i] for i in special]
        self.special_slots = self.slots[special]
        self.greedy = [j for j, row in enumerate(self.special) if row.greedy]
        self.free = [j for j, row in enumerate(self.special) if not row.greedy and not _filters(row.params)]
        self.filtered = [j for j, row in enumerate(self.special) if not row.greedy and _filters(row.params)]
        self.all_special = len(special) == len(slots)
        self.edited = any(row.edited for row in self.special)
        self.banned = [
            (slot, row) for slot, row in zip(self.slots.tolist(), self.rows, strict=True) if row.bans is not None
        ]
        self.learning = [i for i, row in enumerate(self.rows) if row.learns]
        self.logprobs = [i for i, row in enumerate(self.rows) if row.params.logprobs is not None]
        indices = [self.slots, wanted, [wanted[i] for i in special], [wanted[i] for i in self.logprobs]]
        indices += [self.greedy, self.free, self.filtered, self.logprobs]
        on_device = all_to_device([np.array(index, dtype=np.int64) for index in indices], device)
        self.slots_at, self.wanted_at, self.special_at, self.logprob_rows_at = on_device[:4]
        self.greedy_at, self.free_at, self.filtered_at, self.logprobs_at = on_device[4:]
        self.all_wanted = len(wanted) == len(slots)


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


class PendingSample:
    """The tokens of one batch, on their way to the host."""

    def __init__(
        self,
        rows: list[_Row],
        learning: list[int],
        tokens: torch.Tensor,
        best: torch.Tensor,
        logprobs: PendingLogprobs | None,
        logprob_rows: list[int],
        failures: dict[int, Failure],
    ) -> None:
        self._rows = rows
        self._learning = learning
        self._logprobs = logprobs
        self._logprob_rows = logprob_rows
        self._failures = failures
        self._tokens, self._best = to_host(tokens), to_host(best)
        self._event: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> SampledTokens:
        """Waits for the device, and counts the tokens. To be called once."""
        if self._event is not None:
            self._event.synchronize()
        token_ids, failures = self._tokens.numpy(), self._failures
        finite = np.isfinite(self._best.numpy())
        if not finite.all():
            for i in np.flatnonzero(~finite).tolist():
                failures[i] = Failure("internal", "the model's output is not a number")
        complete = []
        for i in self._learning:
            if i not in failures:
                try:
                    self._rows[i].take(int(token_ids[i]))
                except GrammarError as error:
                    failures[i] = Failure("internal", f"a token was taken that must not be: {error}")
                else:
                    if self._rows[i].is_complete:
                        complete.append(i)
        logprobs = {}
        if self._logprobs is not None:
            found = zip(self._logprob_rows, self._logprobs.result(), strict=True)
            logprobs = {i: logprobs for i, logprobs in found if i not in failures}
        return SampledTokens(token_ids, logprobs, failures, complete)


class Sampler:
    """Chooses the next token of every running sequence and keeps what that depends on, by slot."""

    def __init__(
        self,
        max_running: int,
        vocab_size: int,
        device: torch.device | str,
        last_tokens: torch.Tensor | None = None,
    ) -> None:
        """Slots go from 0 to `max_running` - 1; logits have `vocab_size` columns and lie on `device`. `last_tokens`,
        int64[max_running] there, is given every token in its slot's place as soon as the device has it."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.last_tokens = last_tokens
        self._rows: list[_Row | None] = [None] * max_running
        self._bitmask: torch.Tensor | None = None
        self._layout: _Layout | None = None
        # By slot, what drawing needs.
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
        """Begins, or goes on with, a sequence. `output_ids` count as output; a `grammar` that has not accepted all of
        them yet does so now.

        Raises ValueError for a slot in use or a token id outside the vocabulary, GrammarError if the output so far
        does not match the grammar; the slot stays free.
        """
        if self._rows[slot] is not None:
            raise ValueError(f"slot {slot} is in use")
        for token_id in (*sampling.logit_bias, *sampling.stop_token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        if grammar is not None:
            for token_id in output_ids[grammar.num_tokens :]:
                grammar.accept(token_id)
        self._rows[slot] = _Row(sampling, prompt_ids, output_ids, eos_token_ids, grammar)
        self._layout = None
        seed = int.from_bytes(os.urandom(8)) >> 1 if sampling.seed is None else sampling.seed % 2**64
        self._seeds[slot] = seed
        self._num_output[slot] = len(output_ids)
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = min(sampling.top_k, self.vocab_size)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p

    def remove(self, slot: int) -> None:
        """Forgets a slot's sequence. A slot that is free stays free."""
        self._rows[slot] = None
        self._layout = None

    def launch(self, logits: torch.Tensor, slots: np.ndarray) -> PendingSample:
        """Begins to choose one token for each of `slots`, int64[n], row i of `logits` [n, vocab_size] being that of
        `slots[i]`; a row of slot -1 is nobody's. The logits stay as they are and are not needed any more once another
        launch of the device may overwrite them. A row without a token (logits that are no numbers, a grammar that
        allows nothing) is among the `failures`, and the others are none the worse. The `result` of one launch must be
        taken before the next launch.
        """
        layout = self._layout
        if layout is None or not np.array_equal(layout.key, slots):
            layout = self._layout = _Layout(slots, self._rows, self.device)
        best, tokens = _likeliest(logits)
        failures: dict[int, Failure] = {}
        if layout.special:
            chosen = self._choose(logits, layout, failures)
            tokens = chosen if layout.all_special else tokens.index_copy(0, layout.special_at, chosen)
        if not layout.all_wanted:
            best, tokens = best.index_select(0, layout.wanted_at), tokens.index_select(0, layout.wanted_at)
        if self.last_tokens is not None:
            self.last_tokens.index_copy_(0, layout.slots_at, tokens)
        logprobs = None
        if layout.logprobs:
            rows = logits.index_select(0, layout.logprob_rows_at)
            top = [layout.rows[i].params.logprobs or 0 for i in layout.logprobs]
            logprobs = PendingLogprobs(rows, tokens.index_select(0, layout.logprobs_at), top)
        self._count(layout)
        return PendingSample(layout.rows, layout.learning, tokens, best, logprobs, layout.logprobs, failures)

    def _count(self, layout: _Layout) -> None:
        """The tokens of this launch are output from now on, whatever they are."""
        self._num_output[layout.slots] += 1
        for slot, row in layout.banned:
            if self._num_output[slot] >= row.params.min_tokens:
                row.bans = None
                self._layout = None

    def _choose(self, logits: torch.Tensor, layout: _Layout, failures: dict[int, Failure]) -> torch.Tensor:
        """Tokens, int64, of the special rows; those to which a grammar leaves none are `failures`."""
        work = logits if layout.all_special else logits.index_select(0, layout.special_at)
        masked = self._fill_masks(layout, failures)
        if layout.edited or masked:
            work = work.to(torch.float32, copy=True) if work is logits else work.float()
        if layout.edited:
            edits = [Edits(row.params, row.history, row.bias, row.bans) for row in layout.special]
            apply_edits(work, range(len(edits)), edits)
        if masked:
            assert self._bitmask is not None
            apply_bitmask(work, self._bitmask[: len(work)], masked)
        if len(layout.greedy) == len(work):
            return _likeliest(work)[1]
        tokens = torch.zeros(len(work), dtype=torch.int64, device=work.device)
        if layout.greedy:
            tokens.index_copy_(0, layout.greedy_at, _likeliest(work.index_select(0, layout.greedy_at))[1])
        for places, at in ((layout.free, layout.free_at), (layout.filtered, layout.filtered_at)):
            if places:
                some = work if len(places) == len(work) else work.index_select(0, at)
                tokens.index_copy_(0, at, self._draw(some, layout.special_slots[places]))
        return tokens

    def _fill_masks(self, layout: _Layout, failures: dict[int, Failure]) -> list[int]:
        """Writes the masks of the special rows' grammars. Returns the rows where anything is forbidden."""
        masked = []
        for j, row in enumerate(layout.special):
            if row.grammar is None:
                continue
            if self._bitmask is None:
                self._bitmask = new_bitmask(len(self._rows), self.vocab_size)
                if self.device.type == "cuda":
                    self._bitmask = self._bitmask.pin_memory()
            try:
                if row.grammar.fill(self._bitmask[j]):
                    masked.append(j)
            except GrammarError as error:
                failures[layout.rows.index(row)] = Failure("invalid", str(error), row.grammar.param)
        return masked

    def _draw(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """Random tokens, int64[n], of rows with their own temperatures and filters."""
        uniforms = uniform(self._seeds[slots], self._num_output[slots].astype(np.uint64))
        temperature, top_k = self._temperature[slots], self._top_k[slots]
        top_p, min_p = self._top_p[slots], self._min_p[slots]
        if logits.device.type == "cpu":
            probs = torch.softmax(logits / torch.from_numpy(temperature)[:, None], dim=1).numpy()
            # Nothing is possible, or the logits are no numbers: the row has failed, or will when its grammar sees it.
            probs[np.isnan(probs[:, 0])] = 1.0 / probs.shape[1]
            return torch.from_numpy(draw(probs, top_k, top_p, min_p, uniforms))
        top_k = np.where(top_k > 0, top_k, self.vocab_size).astype(np.int32)
        arrays = [temperature[:, None], top_k, top_p.astype(np.float32), min_p.astype(np.float32), uniforms]
        divisor, *limits, uniforms_at = all_to_device(arrays, logits.device)
        asked = [(top_k < self.vocab_size).any(), (top_p < 1).any(), (min_p > 0).any()]
        filters = device_draw.Filters(*(limit if some else None for limit, some in zip(limits, asked, strict=True)))
        return device_draw.draw(torch.softmax(logits / divisor, dim=1), filters, uniforms_at)


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and its index, the first of equals; a NaN is larger than everything, so that the
    largest is a number only where the row can be a distribution. On a CPU through NumPy, which is 13 times as fast."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        tokens = logits.numpy().argmax(axis=1)
        return torch.from_numpy(logits.numpy()[np.arange(len(tokens)), tokens]), torch.from_numpy(tokens)
    best = logits.max(dim=1)
    return best.values, best.indices
