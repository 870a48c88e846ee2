"""Which drafts a step verifies: those that bring more tokens a second than they cost.

A step with the decodes of n sequences gives n tokens in the time T(n) that the fitted cost model predicts. With k more
drafts it takes T(n + k), and each draft adds the probability that it and the drafts before it are right. Drafts go in
by falling probability, and the k with the most tokens a second is taken; often 0.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.shape import BatchShape
from worker.drafts.acceptance import Acceptance
from worker.drafts.drafter import Drafter
from worker.structured_output import GrammarState

# Numbers of drafts in a step that are tried. Between two of them, tokens a second differ little.
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
# A step's drafts are looked for in at most this fraction of its time, on average: otherwise steps go without a look.
LOOK_FRACTION = 0.01


class Draftable(Protocol):
    """A running sequence, as far as drafts need to know it."""

    slot: int

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""

    @property
    def num_known(self) -> int:
        """Tokens whose value is known."""

    @property
    def token_limit(self) -> int:
        """Tokens with which it ends."""

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is computed."""

    def token_ids(self, start: int, end: int) -> np.ndarray:
        """The known tokens from position `start` to `end - 1`."""


class _Guess(NamedTuple):
    """Drafts for one sequence. `chances[i]`: probability that drafts 0 to i are right. `before`: the guess at the
    sequence's last token, where that is pending; it is no draft."""

    before: list[int]
    token_ids: list[int]
    chances: list[float]
    drafter: int
    evidence: int


class SpeculativeDecoding:
    """Asks drafters, learns how often they are right, and chooses. Sequences are known by their slot."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        seconds: Callable[[BatchShape], float],
        most: int,
        exposed_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`seconds`: predicted time of a step. `most`: limit of the drafts of one sequence in a step. `exposed_s`: time
        that a step with drafts takes longer because the next one waits for its tokens. `clock`: in seconds."""
        self._drafters, self._seconds, self._most = drafters, seconds, most
        self._exposed_s, self._clock = exposed_s, clock
        self._acceptance = [Acceptance.of(drafter) for drafter in drafters]
        self._num_told: dict[int, int] = {}  # by slot, tokens of the sequence that the drafters know
        self._in_flight: dict[int, _Guess] = {}  # by slot, the drafts that are being verified
        self._pays = True  # whether the last look found drafts that pay
        self._looked_s = self._steps_s = 0.0  # spent on looking for drafts, and on all steps, both fading
        self.proposals, self.drafted, self.accepted = Counter[str](), Counter[str](), Counter[str]()

    def add(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        prediction_ids: Sequence[int],
        grammar: GrammarState | None,
    ) -> None:
        """Begins with a sequence, as `Drafter.add`."""
        for drafter in self._drafters:
            drafter.add(slot, prompt_ids, output_ids, prediction_ids, grammar)
        for acceptance in self._acceptance:
            acceptance.add(slot)
        self._num_told[slot] = len(prompt_ids) + len(output_ids)

    def remove(self, slot: int) -> None:
        """Forgets the sequence of a slot, if it has one."""
        if self._num_told.pop(slot, None) is not None:
            self._in_flight.pop(slot, None)
            for drafter, acceptance in zip(self._drafters, self._acceptance, strict=True):
                drafter.remove(slot)
                acceptance.remove(slot)

    def choose(self, candidates: Sequence[Draftable], shape: BatchShape, room: int) -> dict[int, list[int]]:
        """The drafts of the next step, by index of the candidate.

        - `candidates`: sequences with a decode in the step. The last token may be pending: drafts follow a guess at it,
          and are verified after its value.
        - `shape`: the step without drafts.
        - `room`: number of drafts that it may take.
        """
        step_s = self._seconds(shape)
        if not self._may_look(step_s):
            return {}
        began_s = self._clock()
        guesses = {i: guess for i, seq in enumerate(candidates) if (guess := self._guess(seq)) is not None}
        chances = sorted((chance for guess in guesses.values() for chance in guess.chances), reverse=True)[:room]
        count = self._best_count(chances, shape, step_s)
        chosen: dict[int, list[int]] = {}
        for i, guess in guesses.items():
            taken = sum(chance >= chances[count - 1] for chance in guess.chances) if count else 0
            taken = min(taken, count - sum(map(len, chosen.values())))
            if taken:
                self._in_flight[candidates[i].slot] = guess
                chosen[i] = guess.token_ids[:taken]
        self._pays = bool(chosen)
        self._looked_s += self._clock() - began_s
        return chosen

    def may_follow(self, candidates: Sequence[Draftable], shape: BatchShape) -> bool:
        """Whether it pays to wait for the tokens of the step in flight, because drafts are likely to follow them.

        - `candidates`: sequences with a decode in that step. The token that it samples is pending.
        - `shape`: that step; the next one is taken to be like it.
        """
        step_s = self._seconds(shape)
        if not candidates or not self._may_look(step_s):
            return False
        began_s = self._clock()
        guesses = [guess for seq in candidates if (guess := self._guess(seq)) is not None]
        chances = sorted((chance for guess in guesses for chance in guess.chances), reverse=True)
        self._pays = self._best_count(chances, shape, step_s) > 0
        self._looked_s += self._clock() - began_s
        return self._pays

    def verified(self, slot: int, last_id: int, proposed: int, accepted: int) -> None:
        """Learns that of a slot's `proposed` drafts, after the token `last_id`, the first `accepted` were right."""
        guess = self._in_flight.pop(slot)
        name = self._drafters[guess.drafter].name
        self.proposals[name] += 1
        self.drafted[name] += proposed
        self.accepted[name] += accepted
        if guess.before and guess.before[-1] != last_id:
            proposed = accepted = 0
        elif guess.before:
            accepted += 1
        self._acceptance[guess.drafter].observe(slot, guess.evidence, proposed + len(guess.before), accepted)

    def _may_look(self, step_s: float) -> bool:
        """Whether looking for drafts costs little of the time of the steps."""
        self._steps_s = 0.99 * self._steps_s + step_s
        self._looked_s *= 0.99
        return self._pays or self._looked_s <= LOOK_FRACTION * self._steps_s

    def _guess(self, seq: Draftable) -> _Guess | None:
        """The drafts of the drafter that promises the most tokens."""
        slot, known = seq.slot, seq.num_known
        told = self._num_told[slot]
        if known > told:
            news = seq.token_ids(told, known).tolist()
            for drafter in self._drafters:
                drafter.extend(slot, news)
            self._num_told[slot] = known
        pending = seq.num_tokens - known  # 0 or 1
        most = min(self._most, seq.token_limit - seq.num_tokens - 1) + pending
        best: _Guess | None = None
        for index, (drafter, acceptance) in enumerate(zip(self._drafters, self._acceptance, strict=True)):
            proposal = drafter.propose(slot, most)
            before, token_ids = proposal.token_ids[:pending], proposal.token_ids[pending:]
            if not token_ids:
                continue
            chance = acceptance.expected(slot, proposal.evidence)
            chances = [chance ** (pending + i + 1) for i in range(len(token_ids))]
            if best is None or sum(chances) > sum(best.chances):
                best = _Guess(before, token_ids, chances, index, proposal.evidence)
        return best

    def _best_count(self, chances: list[float], shape: BatchShape, step_s: float) -> int:
        """The number of drafts with the most tokens a second, 0 if none pay. `chances`: of the drafts, falling.
        `step_s`: predicted time of the step without drafts."""
        best, most = 0, shape.decodes / step_s
        tokens = shape.decodes + np.cumsum(chances)
        for count in [*(count for count in COUNTS if count < len(chances)), len(chances)] if chances else []:
            rate = tokens[count - 1] / (self._seconds(_with_drafts(shape, count)) + self._exposed_s)
            if rate > most:
                best, most = count, rate
        return best


def _with_drafts(shape: BatchShape, count: int) -> BatchShape:
    """The step with `count` drafts, spread over its decodes. Which sequence has how many hardly matters."""
    drafted = shape.copy()
    chunks = min(count, shape.decodes)
    context = shape.decode_context // max(1, shape.decodes) - 1
    for chunk in range(chunks):
        drafted.remove(context, 1)
        drafted.add(context, 1 + (count + chunk) // chunks)
    return drafted
