"""Needs of each row of a batch, and the rows grouped by these needs."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from enum import IntFlag
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from kernels.host_device import all_to_device
from worker.messages import SamplingParams
from worker.sampling.logits_processors import BadWords, LogitsAdjustments, TokenCounts
from worker.structured_output import GrammarError, GrammarState, GrammarThreads, accept_tokens

# Below this temperature the likeliest token is taken. Dividing by the temperature would give the same, or overflow.
_GREEDY_BELOW = 1e-5


class SamplingNeeds(IntFlag):
    """Needs of a slot, as flags. Without any of them its token is the argmax of its logits."""

    NOTHING = 0
    RANDOM = 1  # the token is drawn at random
    FILTERED = 2  # the draw is after top-k, top-p or min-p
    ADJUSTED = 4  # penalties, biases or bans change single logits first
    CONSTRAINED = 8  # a grammar masks tokens
    STATEFUL = 16  # the host's state (counts of tokens, grammar) must take in each token
    MIN_TOKENS = 32  # end tokens are still banned
    LOGPROBS = 64  # log probabilities are returned
    FREE = 128  # the slot has no sequence


class SlotState:
    """Parameters and history of the sequence in a slot."""

    __slots__ = ("allowed", "bad_words", "bias", "grammar", "history", "params", "suppressed")

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
        self.history: TokenCounts | None = None
        if repeats or params.presence_penalty or params.frequency_penalty:
            self.history = TokenCounts(prompt_ids if repeats else (), output_ids)
        self.suppressed: np.ndarray | None = None
        if params.min_tokens > len(output_ids):
            self.suppressed = np.array(sorted({*eos_token_ids, *params.stop_token_ids}), dtype=np.int64)
        self.bias: tuple[np.ndarray, np.ndarray] | None = None
        if params.logit_bias:
            ids = np.array(list(params.logit_bias), dtype=np.int64)
            self.bias = ids, np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.allowed: np.ndarray | None = None
        if params.allowed_token_ids:
            self.allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        self.bad_words = BadWords(params.bad_words, output_ids) if params.bad_words else None

    @property
    def needs(self) -> SamplingNeeds:
        """Current needs: `MIN_TOKENS` ends when enough tokens have been output."""
        params, wants = self.params, SamplingNeeds.NOTHING
        if params.temperature >= _GREEDY_BELOW:
            wants |= SamplingNeeds.RANDOM
            if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                wants |= SamplingNeeds.FILTERED
        changes = self.history, self.suppressed, self.bias, self.allowed, self.bad_words
        if any(change is not None for change in changes):
            wants |= SamplingNeeds.ADJUSTED
        if self.grammar is not None:
            wants |= SamplingNeeds.CONSTRAINED
        if self.follows_tokens:
            wants |= SamplingNeeds.STATEFUL
        if self.suppressed is not None:
            wants |= SamplingNeeds.MIN_TOKENS
        if params.logprobs is not None:
            wants |= SamplingNeeds.LOGPROBS
        return wants

    @property
    def follows_tokens(self) -> bool:
        """Whether each token of the output changes what may come next."""
        return self.history is not None or self.grammar is not None or self.bad_words is not None

    @property
    def adjustments(self) -> LogitsAdjustments:
        """Changes to the logits of the next token."""
        suppressed = self.suppressed
        if self.bad_words is not None:
            banned = self.bad_words.banned
            suppressed = banned if suppressed is None else np.union1d(suppressed, banned)
        return LogitsAdjustments(self.params, self.history, self.bias, suppressed, self.allowed)

    @property
    def is_complete(self) -> bool:
        """Whether the grammar has accepted an end token."""
        return self.grammar is not None and self.grammar.terminated

    def after(self, token_id: int, num_output: int) -> "SlotState":
        """The state if `token_id` were output number `num_output`: this object if nothing of it depends on the token.
        The grammar is the same object, unchanged."""
        if self.history is None and self.suppressed is None and self.bad_words is None:
            return self
        other = copy.copy(self)
        if self.bad_words is not None:
            other.bad_words = self.bad_words.after(token_id)
        if self.history is not None:
            other.history = self.history.copy()
            other.history.add(token_id, 1)
        if num_output >= self.params.min_tokens:
            other.suppressed = None
        return other


def append_tokens(
    states: Mapping[int, SlotState], token_ids: Mapping[int, list[int]], threads: GrammarThreads
) -> tuple[dict[int, list[int]], dict[int, GrammarError]]:
    """Lets each state take in its tokens, up to one that completes its grammar. Returns the tokens taken of each, and
    errors of those whose grammar does not allow one. Such a state is of no further use."""
    taken, errors = dict(token_ids), dict[int, GrammarError]()
    going = [i for i, state in states.items() if state.follows_tokens]
    number = 0
    while going := [i for i in going if number < len(taken[i])]:
        guided = list[tuple[int, GrammarState]]()
        for i in going:
            state = states[i]
            if state.history is not None:
                state.history.add(taken[i][number], 1)
            if state.bad_words is not None:
                state.bad_words.add(taken[i][number])
            if state.grammar is not None:
                guided.append((i, state.grammar))
        wrong = accept_tokens([grammar for _, grammar in guided], [taken[i][number] for i, _ in guided], threads)
        number += 1
        for position, error in wrong.items():
            i = guided[position][0]
            errors[i], taken[i] = error, taken[i][: number - 1]
        for i, grammar in guided:
            if grammar.terminated:
                taken[i] = taken[i][:number]
    return taken, errors


# As plain integers: NumPy is faster with them than with an IntFlag.
_FREE, _STATEFUL, _LOGPROBS, _MIN_TOKENS = (
    int(SamplingNeeds.FREE),
    int(SamplingNeeds.STATEFUL),
    int(SamplingNeeds.LOGPROBS),
    int(SamplingNeeds.MIN_TOKENS),
)
_ADJUSTED, _CONSTRAINED, _RANDOM, _FILTERED = (
    int(SamplingNeeds.ADJUSTED),
    int(SamplingNeeds.CONSTRAINED),
    int(SamplingNeeds.RANDOM),
    int(SamplingNeeds.FILTERED),
)
_NO_ROWS = np.empty(0, dtype=np.int64)


class SamplingMetadata:
    """Rows of a batch, grouped by need. Valid while the same slots come in the same order with the same needs.

    A sampled row is a row of logits that gets a token. Sampled rows that are in no group take the argmax.

    | attribute | meaning |
    | --- | --- |
    | `key` | slot of every row of logits, -1 for a row without a sequence |
    | `sampled_rows` | rows of logits that get a token |
    | `slots` | slot of each sampled row |
    | `constrained` | sampled rows that take the likeliest token of those that their grammar allows |
    | `custom` | sampled rows that need anything else (adjusted logits, a random draw), with or without a grammar |
    | `constrained_states`, `custom_states` | states of these rows' slots |
    | `custom_slots` | slots of the `custom` rows |
    | `greedy` | `custom` rows that take the likeliest token after adjustments and mask |
    | `unfiltered` | `custom` rows that draw from the whole distribution |
    | `filtered` | `custom` rows that draw after top-k, top-p or min-p |
    | `masked` | `custom` rows with a grammar |
    | `is_adjusted` | whether any row adjusts logits |
    | `min_tokens_slots` | slots whose end tokens are still banned |
    | `stateful` | (sampled row, its state) for states that take in each token |
    | `logprobs`, `logprob_states` | sampled rows that return log probabilities, and their states |

    Sampled rows are given by their position in `sampled_rows`, and `greedy`, `unfiltered`, `filtered` and `masked` by
    their position in `custom`.
    """

    def __init__(
        self,
        slots: np.ndarray,
        needs: np.ndarray,
        states: Sequence[SlotState | None],
        device: torch.device,
        drafted: Mapping[int, SlotState] = MappingProxyType({}),
    ) -> None:
        """`slots`: slot of each row of logits, int64, -1 for a row without a sequence. `needs` and `states` have one
        entry for each slot. `drafted`: states of sampled rows that come after drafts. Raises ValueError for a slot that
        is free."""
        self.key = slots
        self._device = device
        self._states, self._drafted = states, drafted
        self.sampled_rows = np.flatnonzero(slots >= 0)
        self.slots = slots[self.sampled_rows]
        kinds = needs[self.slots]
        if (kinds & _FREE).any():
            raise ValueError(f"slot {self.slots[(kinds & _FREE) > 0][0]} is free")
        if np.count_nonzero(kinds):
            self._group(kinds)
        else:  # all take the argmax: a short cut, since every step with drafts makes its own groups
            self.constrained, self.custom, self.logprobs = list[int](), list[int](), list[int]()
            self.constrained_states, self.custom_states = list[SlotState](), list[SlotState]()
            self.greedy = self.unfiltered = self.filtered = self.masked = self.custom_slots = _NO_ROWS
            self.is_adjusted, self.min_tokens_slots = False, list[int]()
            self.stateful, self.logprob_states = list[tuple[int, SlotState]](), list[SlotState]()

    def _group(self, kinds: np.ndarray) -> None:
        """Groups the sampled rows by their needs, `kinds`."""
        how = kinds & (_RANDOM | _ADJUSTED | _CONSTRAINED)
        constrained, custom = np.flatnonzero(how == _CONSTRAINED), np.flatnonzero(how & ~_CONSTRAINED)
        self.constrained, self.custom = constrained.tolist(), custom.tolist()
        self.constrained_states, self.custom_states = self._states_of(constrained), self._states_of(custom)
        self.custom_slots = self.slots[custom]
        drawn = kinds[custom] & (_RANDOM | _FILTERED)
        self.greedy, self.unfiltered = np.flatnonzero(drawn == 0), np.flatnonzero(drawn == _RANDOM)
        self.filtered, self.masked = np.flatnonzero(drawn & _FILTERED), np.flatnonzero(kinds[custom] & _CONSTRAINED)
        self.is_adjusted = bool((kinds & _ADJUSTED).any())
        self.min_tokens_slots = self.slots[(kinds & _MIN_TOKENS) > 0].tolist()
        stateful, logprobs = np.flatnonzero(kinds & _STATEFUL), np.flatnonzero(kinds & _LOGPROBS)
        self.stateful = list(zip(stateful.tolist(), self._states_of(stateful), strict=True))
        self.logprobs, self.logprob_states = logprobs.tolist(), self._states_of(logprobs)

    @cached_property
    def on_device(self) -> "SamplingIndices":
        """The indices on the device, copied at first use. Not used where a CUDA graph has done all the work."""
        others = np.array(self.constrained + self.custom, dtype=np.int64)
        indices = [
            self.sampled_rows,
            self.slots,
            self.sampled_rows[self.constrained],
            self.sampled_rows[self.custom],
        ]
        indices += [self.sampled_rows[self.logprobs], self.sampled_rows[others], self.slots[others]]
        indices += [self.greedy, self.unfiltered, self.filtered, self.masked]
        return SamplingIndices(*all_to_device(indices, self._device))

    def _states_of(self, positions: np.ndarray) -> list[SlotState]:
        """States of the sampled rows at these positions."""
        both = zip(positions.tolist(), self.slots[positions].tolist(), strict=True)
        found = (self._drafted.get(position, self._states[slot]) for position, slot in both)
        return [row for row in found if row is not None]


class SamplingIndices(NamedTuple):
    """Groups of `SamplingMetadata` on the device, each an int64 vector.

    | field | meaning |
    | --- | --- |
    | `sampled_rows` | rows of logits that get a token |
    | `slots` | slot of each sampled row |
    | `constrained` | rows of logits that take the likeliest token of those that their grammar allows |
    | `custom` | rows of logits that need anything else than an argmax |
    | `logprobs` | rows of logits that return log probabilities |
    | `others` | `constrained`, then `custom` |
    | `other_slots` | slot of each row in `others` |
    | `greedy` | positions in `custom` that take the likeliest token after adjustments and mask |
    | `unfiltered` | positions in `custom` that draw from the whole distribution |
    | `filtered` | positions in `custom` that draw after top-k, top-p or min-p |
    | `masked` | positions in `custom` with a grammar |
    """

    sampled_rows: torch.Tensor
    slots: torch.Tensor
    constrained: torch.Tensor
    custom: torch.Tensor
    logprobs: torch.Tensor
    others: torch.Tensor
    other_slots: torch.Tensor
    greedy: torch.Tensor
    unfiltered: torch.Tensor
    filtered: torch.Tensor
    masked: torch.Tensor
