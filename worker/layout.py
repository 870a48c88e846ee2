"""What the rows of a batch want of the sampler, and which of them want the same."""

from collections.abc import Iterable, Sequence
from enum import IntFlag

import numpy as np
import torch

from kernels.transfer import all_to_device
from worker.edits import Edits, History
from worker.grammar import GrammarState
from worker.messages import SamplingParams

# Below this temperature the likeliest token is taken: it is what the division leaves, without overflow.
_GREEDY_BELOW = 1e-5


class Wants(IntFlag):
    """What a row wants beside the likeliest token, or instead of it."""

    NOTHING = 0
    DRAWN = 1  # a random token
    FILTERED = 2  # of a part of the distribution
    EDITED = 4  # single logits change before
    GUIDED = 8  # a grammar says what may come
    LEARNS = 16  # the next token depends on this one by more than the model
    BANS = 32  # end tokens may not come yet
    LOGPROBS = 64
    FREE = 128  # there is no sequence


class Row:
    """A slot's parameters and history."""

    __slots__ = ("bans", "bias", "grammar", "history", "params")

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
    def wants(self) -> Wants:
        params, wants = self.params, Wants.NOTHING
        if params.temperature >= _GREEDY_BELOW:
            wants |= Wants.DRAWN
            if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                wants |= Wants.FILTERED
        if self.history is not None or self.bans is not None or self.bias is not None:
            wants |= Wants.EDITED
        if self.grammar is not None:
            wants |= Wants.GUIDED
        if self.history is not None or self.grammar is not None:
            wants |= Wants.LEARNS
        if self.bans is not None:
            wants |= Wants.BANS
        if params.logprobs is not None:
            wants |= Wants.LOGPROBS
        return wants

    @property
    def edits(self) -> Edits:
        return Edits(self.params, self.history, self.bias, self.bans)

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


class Layout:
    """Who is where in a batch, for as long as the same slots come in the same order and want the same.

    `wanted` are the rows of logits that get a token, `slots` theirs. Most take the likeliest. Of the others, by their
    place among those that get a token: `guided` take the likeliest of what their grammar allows, `special` want
    something else. Of these, by their place among them, `greedy` take the likeliest of what is left, `free` draw from
    the whole distribution and `filtered` from a part. Names in `_at` are the same on the device, int64: `guided_at`,
    `special_at` and `logprobs_at` are rows of logits there, `others_at` is of both kinds of others and
    `other_slots_at` their slots.
    """

    def __init__(self, slots: np.ndarray, wants: np.ndarray, rows: Sequence[Row | None], device: torch.device) -> None:
        """`slots`, int64, of the rows of logits, -1 for those of nobody; `wants` and `rows` are of all slots. Raises
        ValueError for a slot that is free."""
        self.key = slots
        self.wanted = np.flatnonzero(slots >= 0)
        self.slots = slots[self.wanted]
        kinds = wants[self.slots]
        if (kinds & Wants.FREE).any():
            raise ValueError(f"slot {self.slots[(kinds & Wants.FREE) > 0][0]} is free")
        how = kinds & (Wants.DRAWN | Wants.EDITED | Wants.GUIDED)
        guided, special = np.flatnonzero(how == Wants.GUIDED), np.flatnonzero(how & ~Wants.GUIDED)
        self.guided, self.special = guided.tolist(), special.tolist()
        self._rows = rows
        self.guided_rows, self.special_rows = self.rows_of(guided), self.rows_of(special)
        self.special_slots = self.slots[special]
        drawn = kinds[special] & (Wants.DRAWN | Wants.FILTERED)
        self.greedy = np.flatnonzero(drawn == Wants.NOTHING)
        self.free = np.flatnonzero(drawn == Wants.DRAWN)
        self.filtered = np.flatnonzero(drawn & Wants.FILTERED)
        self.is_edited = bool((kinds & Wants.EDITED).any())
        self.banned_slots = self.slots[(kinds & Wants.BANS) > 0]
        learning, logprobs = np.flatnonzero(kinds & Wants.LEARNS), np.flatnonzero(kinds & Wants.LOGPROBS)
        self.learning = list(zip(learning.tolist(), self.rows_of(learning), strict=True))
        self.logprobs, self.logprob_rows = logprobs.tolist(), self.rows_of(logprobs)
        others = np.concatenate((guided, special))
        indices = [self.wanted, self.slots, self.wanted[guided], self.wanted[special], self.wanted[logprobs]]
        indices += [self.wanted[others], self.slots[others], self.greedy, self.free, self.filtered]
        on_device = all_to_device(indices, device)
        self.wanted_at, self.slots_at, self.guided_at, self.special_at, self.logprobs_at = on_device[:5]
        self.others_at, self.other_slots_at, self.greedy_at, self.free_at, self.filtered_at = on_device[5:]

    def rows_of(self, places: np.ndarray) -> list[Row]:
        """Of those that get a token, the rows at these places."""
        found = (self._rows[slot] for slot in self.slots[places].tolist())
        return [row for row in found if row is not None]
