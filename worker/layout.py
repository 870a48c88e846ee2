"""What the rows of a batch want of the sampler, and which of them want the same."""

from collections.abc import Iterable, Sequence
from enum import IntFlag
from functools import cached_property
from typing import NamedTuple

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
        """Now: bans end when enough has been output."""
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
        """What is to be changed in the logits of the next token."""
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


# As plain numbers, which arrays are quicker with.
_FREE, _LEARNS, _LOGPROBS, _BANS = int(Wants.FREE), int(Wants.LEARNS), int(Wants.LOGPROBS), int(Wants.BANS)
_EDITED, _GUIDED, _DRAWN, _FILTERED = int(Wants.EDITED), int(Wants.GUIDED), int(Wants.DRAWN), int(Wants.FILTERED)


class Layout:
    """Who is where in a batch, for as long as the same slots come in the same order and want the same.

    `wanted` are the rows of logits that get a token, `slots` theirs. Most take the likeliest. Of the others, by their
    place among those that get a token: `guided` take the likeliest of what their grammar allows, `special` want
    something else. Of these, by their place among them, `greedy` take the likeliest of what is left, `free` draw from
    the whole distribution and `filtered` from a part.
    """

    def __init__(self, slots: np.ndarray, wants: np.ndarray, rows: Sequence[Row | None], device: torch.device) -> None:
        """`slots`, int64, of the rows of logits, -1 for those of nobody; `wants` and `rows` are of all slots. Raises
        ValueError for a slot that is free."""
        self.key = slots
        self._device = device
        self._rows = rows
        self.wanted = np.flatnonzero(slots >= 0)
        self.slots = slots[self.wanted]
        kinds = wants[self.slots]
        if (kinds & _FREE).any():
            raise ValueError(f"slot {self.slots[(kinds & _FREE) > 0][0]} is free")
        how = kinds & (_DRAWN | _EDITED | _GUIDED)
        guided, special = np.flatnonzero(how == _GUIDED), np.flatnonzero(how & ~_GUIDED)
        self.guided, self.special = guided.tolist(), special.tolist()
        self.guided_rows, self.special_rows = self._rows_of(guided), self._rows_of(special)
        self.special_slots = self.slots[special]
        drawn = kinds[special] & (_DRAWN | _FILTERED)
        self.greedy, self.free = np.flatnonzero(drawn == 0), np.flatnonzero(drawn == _DRAWN)
        self.filtered = np.flatnonzero(drawn & _FILTERED)
        self.is_edited = bool((kinds & _EDITED).any())
        self.banned_slots = self.slots[(kinds & _BANS) > 0].tolist()
        learning, logprobs = np.flatnonzero(kinds & _LEARNS), np.flatnonzero(kinds & _LOGPROBS)
        self.learning = list(zip(learning.tolist(), self._rows_of(learning), strict=True))
        self.logprobs, self.logprob_rows = logprobs.tolist(), self._rows_of(logprobs)

    @cached_property
    def on_device(self) -> "Places":
        """Not asked for where a graph has done all that there is to do."""
        others = np.array(self.guided + self.special, dtype=np.int64)
        indices = [self.wanted, self.slots, self.wanted[self.guided], self.wanted[self.special]]
        indices += [self.wanted[self.logprobs], self.wanted[others], self.slots[others]]
        return Places(*all_to_device([*indices, self.greedy, self.free, self.filtered], self._device))

    def _rows_of(self, places: np.ndarray) -> list[Row]:
        """Of those that get a token, the rows at these places."""
        found = (self._rows[slot] for slot in self.slots[places].tolist())
        return [row for row in found if row is not None]


class Places(NamedTuple):
    """Of a layout, on the device, int64: what is `wanted`, the slots of those; rows of logits that are guided, special,
    want log probabilities, are one of the two others, and the slots of these; and of the special rows those kinds."""

    wanted: torch.Tensor
    slots: torch.Tensor
    guided: torch.Tensor
    special: torch.Tensor
    logprobs: torch.Tensor
    others: torch.Tensor
    other_slots: torch.Tensor
    greedy: torch.Tensor
    free: torch.Tensor
    filtered: torch.Tensor
