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

from kernels.transfer import Turn, Turns, all_to_device
from worker import device_draw
from worker.batch import PROMPT_LOGIT_ROWS
from worker.draw import draw, uniform
from worker.edits import apply_edits
from worker.grammar import GrammarError, GrammarState, apply_bitmask
from worker.layout import Layout, Row, Wants
from worker.logprobs import PendingLogprobs
from worker.masks import Masks
from worker.messages import Failure, SamplingParams, TokenLogprobs


class SampledTokens(NamedTuple):
    """What those rows of a launch got that are somebody's: their next tokens, int64 `[n]`, and by a row's place among
    them the log probabilities that were asked for; the failures, which are the row's alone and leave it without a
    token; and whose grammar is complete with this token."""

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, Failure]
    complete: list[int]


class PendingSample:
    """The tokens of one batch, on their way to the host."""

    def __init__(
        self,
        layout: Layout,
        tokens: torch.Tensor,
        landing: Turn,
        logprobs: PendingLogprobs | None,
        failures: dict[int, Failure],
    ) -> None:
        """`tokens` are of all rows of logits. They come to the host in `landing`."""
        self._layout = layout
        self._logprobs = logprobs
        self._failures = failures
        self._landing = landing
        self._tokens = landing.bytes_[: tokens.nbytes].view(tokens.dtype)
        self._tokens.copy_(tokens, non_blocking=True)
        landing.begun()

    def result(self) -> SampledTokens:
        """Waits for the device, and counts the tokens. To be called once."""
        self._landing.wait()
        layout, failures = self._layout, self._failures
        token_ids = self._tokens.numpy()[layout.wanted]
        for i in np.flatnonzero(token_ids < 0).tolist():
            failures.setdefault(i, Failure("internal", "the model's output is not a number"))
        complete = []
        for i, row in layout.learning:
            if i not in failures:
                try:
                    row.take(int(token_ids[i]))
                except GrammarError as error:
                    failures[i] = Failure("internal", f"a token was taken that must not be: {error}")
                else:
                    if row.is_complete:
                        complete.append(i)
        logprobs = {}
        if self._logprobs is not None:
            found = zip(layout.logprobs, self._logprobs.result(), strict=True)
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
        self._rows: list[Row | None] = [None] * max_running
        self._wants = np.full(max_running, Wants.FREE, dtype=np.int64)
        self._masks: Masks | None = None
        self._layout: Layout | None = None
        self._landings = Turns(self.device, 8 * (max_running + PROMPT_LOGIT_ROWS))
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
        row = Row(sampling, prompt_ids, output_ids, eos_token_ids, grammar)
        self._rows[slot], self._wants[slot] = row, row.wants
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
        self._rows[slot], self._wants[slot] = None, Wants.FREE
        self._layout = None

    def launch(self, logits: torch.Tensor, slots: np.ndarray, likeliest: torch.Tensor | None = None) -> PendingSample:
        """Begins to choose one token for each of `slots`, int64[n], row i of `logits` float32[n, vocab_size] being that
        of `slots[i]`; a row of slot -1 is nobody's. With `likeliest` (as `kernels.likeliest` has it) the tokens with
        the largest logits are known, and `last_tokens` already.

        The logits stay as they are and are not needed any more once another launch of the device may overwrite them. A
        row without a token (logits that are no numbers, a grammar that allows nothing) is among the `failures`, and
        the others are none the worse. The `result` of one launch must be taken before the next launch.
        """
        layout = self._layout
        if layout is None or not np.array_equal(layout.key, slots):
            layout = self._layout = Layout(slots, self._wants, self._rows, self.device)
        plain = tokens = _likeliest(logits) if likeliest is None else likeliest
        failures: dict[int, Failure] = {}
        if layout.guided or layout.special:
            masks = self._fill_masks(layout, failures)
            if layout.guided:
                assert masks is not None
                chosen = _likeliest_allowed(logits, layout.on_device.guided, masks[: len(layout.guided)])
                tokens = tokens.index_copy(0, layout.on_device.guided, chosen)
            if layout.special:
                chosen = self._choose(logits, layout, None if masks is None else masks[len(layout.guided) :])
                tokens = tokens.index_copy(0, layout.on_device.special, chosen)
            tokens = torch.where(plain < 0, -1, tokens)
        if likeliest is None:
            self._keep(tokens, layout.on_device.wanted, layout.on_device.slots)
        elif layout.guided or layout.special:
            self._keep(tokens, layout.on_device.others, layout.on_device.other_slots)
        logprobs = None
        if layout.logprobs:
            rows = layout.on_device.logprobs
            top = [row.params.logprobs or 0 for row in layout.logprob_rows]
            logprobs = PendingLogprobs(logits.index_select(0, rows), tokens.index_select(0, rows).clamp_(min=0), top)
        self._count(layout)
        return PendingSample(layout, tokens, self._landings.next(), logprobs, failures)

    def _keep(self, tokens: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """The tokens of these rows are the last ones of their slots."""
        if self.last_tokens is not None:
            self.last_tokens.index_copy_(0, slots, tokens.index_select(0, rows).clamp_(min=0))

    def _count(self, layout: Layout) -> None:
        """The tokens of this launch are output from now on, whatever they are."""
        self._num_output[layout.slots] += 1
        for slot in layout.banned_slots:
            row = self._rows[slot]
            if row is not None and self._num_output[slot] >= row.params.min_tokens:
                row.bans = None
                self._wants[slot] = row.wants
                self._layout = None

    def _fill_masks(self, layout: Layout, failures: dict[int, Failure]) -> torch.Tensor | None:
        """The masks of all grammars on the device: the guided rows' first, then those of the special rows, of which
        some may have none. Rows to which a grammar leaves nothing are `failures`."""
        rows, places = layout.guided_rows + layout.special_rows, layout.guided + layout.special
        states = [(i, row.grammar) for i, row in enumerate(rows) if row.grammar is not None]
        if not states:
            return None
        if self._masks is None:
            self._masks = Masks(len(self._rows), self.vocab_size, self.device)
        for i, error in self._masks.fill([state for _, state in states], [i for i, _ in states]).items():
            number, state = states[i]
            failures[places[number]] = Failure("invalid", str(error), state.param)
        return self._masks.on_device(len(rows))

    def _choose(self, logits: torch.Tensor, layout: Layout, masks: torch.Tensor | None) -> torch.Tensor:
        """Tokens, int64, of the special rows, whose masks these are."""
        work = logits.index_select(0, layout.on_device.special)
        if layout.is_edited:
            apply_edits(work, range(len(work)), [row.edits for row in layout.special_rows])
        masked = [j for j, row in enumerate(layout.special_rows) if row.grammar is not None]
        if masks is not None and masked:
            apply_bitmask(work, masks, masked)
        if len(layout.greedy) == len(work):
            return _likeliest(work)
        tokens = torch.zeros(len(work), dtype=torch.int64, device=work.device)
        if len(layout.greedy):
            tokens.index_copy_(0, layout.on_device.greedy, _likeliest(work.index_select(0, layout.on_device.greedy)))
        for places, at in ((layout.free, layout.on_device.free), (layout.filtered, layout.on_device.filtered)):
            if len(places):
                some = work if len(places) == len(work) else work.index_select(0, at)
                tokens.index_copy_(0, at, self._draw(some, layout.special_slots[places]))
        return tokens

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


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """`kernels.likeliest` on any device: the first of the largest logits of each row, int64, -1 where that is no
    number. On a CPU through NumPy, which is 13 times as fast as PyTorch."""
    if logits.device.type == "cpu":
        values = logits.numpy()
        tokens = values.argmax(axis=1)
        tokens[~np.isfinite(values[np.arange(len(tokens)), tokens])] = -1
        return torch.from_numpy(tokens)
    from kernels.likeliest import likeliest

    return likeliest(logits)


def _likeliest_allowed(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """`_likeliest` of these rows of logits, int64, each of those tokens that its mask allows."""
    if logits.device.type == "cpu":
        work = logits.index_select(0, rows)
        apply_bitmask(work, masks, list(range(len(work))))
        return _likeliest(work)
    from kernels.likeliest import likeliest

    return likeliest(logits, rows, masks)
