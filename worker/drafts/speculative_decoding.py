"""Which drafts a step verifies: those that bring more tokens a second than they cost.

A step with the decodes of n sequences gives n tokens in the time T(n) that the fitted cost model predicts. With k more
drafts it takes T(n + k), and each draft adds the probability that it and the drafts before it are right. Drafts go in
by falling probability, and the k with the most tokens a second is taken; often 0.

CUDA graphs change this in two ways. A step is padded to the next size of a graph, so drafts that fill the padding are
tried together. And no draft makes a step too long for a graph: launched one by one, its kernels take much longer, which
the fitted costs, linear in rows, cannot tell.

Drafters whose proposals take time of their own (`Drafter.is_batched`) are asked after the others. They are asked for as
many drafts as bring the most tokens a second with that time counted, if these are right as often as those before; often
for none.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from pipeline.padding import UNPADDED, PaddedSizes
from pipeline.shape import BatchShape
from worker.drafts.acceptance_rates import Acceptance
from worker.drafts.drafter import Draftable, Drafter
from worker.messages import ReplicaLoad
from worker.structured_output import GrammarState

# Numbers of drafts in a step that are tried, each with those that fill its padding. Between two of them, tokens a
# second differ little.
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
# While no drafts pay, looks for drafts take at most this fraction of the steps' time. (One CPU core, 240 sequences,
# steps of 12 ms: 0.55%; looks at all sequences, put off by what the last one took, took 2.3%.) What a look took beyond
# that puts off the next one, by at most `MAX_STEPS_OFF` steps: by `MIN_STEPS_OFF` at most at first, twice as many
# after each look at all sequences in vain.
LOOK_FRACTION = 0.005
MIN_STEPS_OFF, MAX_STEPS_OFF = 64, 1024
# A look may take the time that this many steps give.
_STEPS_SAVED = 16


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
        rows: PaddedSizes = UNPADDED,
    ) -> None:
        """`seconds`: predicted time of a step. `most`: limit of the drafts of one sequence in a step. `exposed_s`: time
        that a step with drafts takes longer because the next one waits for its tokens. `clock`: in seconds. `rows`: the
        sizes of CUDA graphs."""
        self._drafters, self._seconds, self._most = drafters, seconds, most
        self._exposed_s, self._clock, self._rows = exposed_s, clock, rows
        self._batched = [index for index, drafter in enumerate(drafters) if drafter.is_batched]
        self._acceptance = [Acceptance.of(drafter) for drafter in drafters]
        self._num_told: dict[int, int] = {}  # by slot, tokens of the sequence that the drafters know
        self._in_flight: dict[int, _Guess] = {}  # by slot, the drafts that are being verified
        self._pays = False  # whether the last look found drafts that pay
        self._credit_s = 0.0  # time that looks may take; negative while they are put off
        self._steps_off = MIN_STEPS_OFF  # for at most this many steps
        self._turn = 0  # the candidate at which the next look at some of them begins
        self._proposals, self._drafted, self._accepted = Counter[str](), Counter[str](), Counter[str]()

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

    def choose(
        self,
        candidates: Sequence[Draftable],
        shape: BatchShape,
        room: int,
        make_room: Callable[[Any, int], int] = lambda seq, tokens: tokens,
    ) -> dict[int, list[int]]:
        """The drafts of the next step, by index of the candidate.

        - `candidates`: sequences with a decode in the step. The last token may be pending: drafts follow a guess at it,
          and are verified after its value.
        - `shape`: the step without drafts.
        - `room`: number of drafts that it may take.
        - `make_room`: finds pages for a number of further tokens of a candidate. Returns the number of tokens that fit.
        """
        step_s = self._seconds(shape)
        if (limit := self._rows.room(shape)) is not None:
            room = min(room, limit)
        if room <= 0 or not self._may_look(step_s):
            return {}
        began_s = self._clock()
        rates = self._rates(shape, step_s, room)
        guesses, share = self._guesses(candidates, began_s)
        was_asked = [self._ask(index, candidates, guesses, rates, make_room) for index in self._batched]
        known = _chances(guesses)
        count, _ = rates.best(known)
        chances = rates.falling(known)
        chosen: dict[int, list[int]] = {}
        least, left = chances[count - 1] if count else 0.0, count
        for i, guess in guesses.items() if count else ():
            taken = min(left, sum(chance >= least for chance in guess.chances))
            if taken:
                left -= taken
                self._in_flight[candidates[i].slot] = guess
                chosen[i] = guess.token_ids[:taken]
        self._looked(bool(chosen) or any(was_asked) or self._promises(known, share, rates), share, began_s, step_s)
        return chosen

    def may_follow(self, candidates: Sequence[Draftable], shape: BatchShape) -> bool:
        """Whether it pays to wait for the tokens of the step in flight, because drafts are likely to follow them.

        - `candidates`: sequences with a decode in that step. The token that it samples is pending.
        - `shape`: that step; the next one is taken to be like it.
        """
        step_s = self._seconds(shape)
        room = self._rows.room(shape)
        if not candidates or room == 0 or not self._may_look(step_s):
            return False
        began_s = self._clock()
        most = self._most * len(candidates)
        rates = self._rates(shape, step_s, most if room is None else min(room, most))
        guesses, share = self._guesses(candidates, began_s)
        pays = self._promises(_chances(guesses), share, rates) or any(
            self._length(index, candidates, guesses, rates)[0] for index in self._batched
        )
        self._looked(pays, share, began_s, step_s)
        return self._pays

    def verified(self, seq: Draftable, start: int, proposed: int, accepted: int) -> None:
        """Learns that of a sequence's `proposed` drafts, after the token at position `start`, the first `accepted` were
        right."""
        slot = seq.slot
        guess = self._in_flight.pop(slot)
        name = self._drafters[guess.drafter].name
        self._proposals[name] += 1
        self._drafted[name] += proposed
        self._accepted[name] += accepted
        if guess.before:  # on a pending token
            if int(seq.token_ids(start, start + 1)[0]) == guess.before[-1]:
                accepted += 1
            else:
                proposed = accepted = 0
        self._acceptance[guess.drafter].observe(slot, guess.evidence, proposed + len(guess.before), accepted)

    def describe(self, load: ReplicaLoad) -> None:
        """Sets the counters of drafts, by drafter."""
        load.proposals = dict(self._proposals)
        load.drafted, load.accepted = dict(self._drafted), dict(self._accepted)

    def _may_look(self, step_s: float) -> bool:
        """Whether to look for drafts: the last ones paid, or a look costs little of the time of the steps."""
        gained_s = LOOK_FRACTION * step_s
        self._credit_s = min(self._credit_s + gained_s, _STEPS_SAVED * gained_s)
        return self._pays or self._credit_s > 0.0

    def _guesses(self, candidates: Sequence[Draftable], began_s: float) -> tuple[dict[int, _Guess], float]:
        """Guesses by index of the candidate, and how many candidates there are for each that was asked about. While no
        drafts pay, only as many are asked about, in turn, as there is time for, at least one."""
        guesses, count, asked = dict[int, _Guess](), len(candidates), 0
        first = 0 if self._pays else self._turn
        for asked in range(1, count + 1):
            i = (first + asked - 1) % count
            if (guess := self._guess(candidates[i])) is not None:
                guesses[i] = guess
            if not self._pays and self._clock() - began_s > self._credit_s:
                break
        self._turn = (first + asked) % max(1, count)
        return guesses, count / max(1, asked)

    @staticmethod
    def _promises(known: np.ndarray, share: float, rates: "_Rates") -> bool:
        """Whether drafts pay if the candidates that were not asked about have such as the others, whose probabilities
        `known` has. `share`: as `_guesses` returns it."""
        return bool(rates.best(np.repeat(known, round(share)) if share > 1.0 else known)[0])

    def _looked(self, pays: bool, share: float, began_s: float, step_s: float) -> None:
        """Takes in what a look has shown and what it took."""
        if pays and share == 1.0:
            self._steps_off, self._pays = MIN_STEPS_OFF, True
            return  # has paid for itself
        if self._pays and not pays:
            self._steps_off = min(2 * self._steps_off, MAX_STEPS_OFF)
        self._pays = pays
        self._credit_s = max(self._credit_s - (self._clock() - began_s), -self._steps_off * LOOK_FRACTION * step_s)

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
        most = self._limit(seq) + pending
        best: _Guess | None = None
        for index, (drafter, acceptance) in enumerate(zip(self._drafters, self._acceptance, strict=True)):
            if drafter.is_batched:
                continue
            proposal = drafter.propose(slot, most)
            before, token_ids = proposal.token_ids[:pending], proposal.token_ids[pending:]
            if not token_ids:
                continue
            chance = acceptance.expected(slot, proposal.evidence)
            chances = [chance ** (pending + i + 1) for i in range(len(token_ids))]
            if best is None or sum(chances) > sum(best.chances):
                best = _Guess(before, token_ids, chances, index, proposal.evidence)
        return best

    def _ask(
        self,
        index: int,
        candidates: Sequence[Draftable],
        guesses: dict[int, _Guess],
        rates: "_Rates",
        make_room: Callable[[Any, int], int],
    ) -> bool:
        """Lets a batched drafter propose, if that pays, and takes its guesses. Returns whether it was asked."""
        drafter = self._drafters[index]
        length, asked = self._length(index, candidates, guesses, rates)
        if not length:
            drafter.passed_over()
            return False
        sequences = [candidates[i] for i in asked]
        most = [min(self._limit(seq), length, make_room(seq, 1 + length) - 1) for seq in sequences]
        proposals = drafter.propose_all(sequences, most)
        for i, proposal in zip(asked, proposals, strict=True):
            if proposal.token_ids:
                chance = self._acceptance[index].expected(candidates[i].slot, proposal.evidence)
                chances = [chance ** (number + 1) for number in range(len(proposal.token_ids))]
                guesses[i] = _Guess([], proposal.token_ids, chances, index, proposal.evidence)
        return True

    def _length(
        self, index: int, candidates: Sequence[Draftable], guesses: Mapping[int, _Guess], rates: "_Rates"
    ) -> tuple[int, list[int]]:
        """For how many drafts a batched drafter is best asked, with its own time counted, and for which candidates,
        whose guesses by others promise less. 0 if it does not pay."""
        drafter, acceptance = self._drafters[index], self._acceptance[index]
        numbers = np.arange(1, self._most + 1)
        expected = np.array([[acceptance.expected(seq.slot, 0)] for seq in candidates])
        limits = np.array([[self._limit(seq)] for seq in candidates])
        own = np.where(numbers <= limits, expected**numbers, 0.0)
        others = np.zeros_like(own)
        for i, guess in guesses.items():
            others[i, : len(guess.chances)] = guess.chances
        promised, theirs = own.cumsum(axis=1), others.sum(axis=1)
        best, (_, most) = (0, list[int]()), rates.best(others)
        for length in (*(count for count in COUNTS if count < self._most), self._most):
            asked = promised[:, length - 1] > theirs
            if not asked.any():
                continue
            chances = np.where(asked[:, None], np.where(numbers <= length, own, 0.0), others)
            _, rate = rates.best(chances, drafter.seconds(rates.single(int(asked.sum())), length))
            if rate > most:
                best, most = (length, np.flatnonzero(asked).tolist()), rate
            elif best[0]:
                break
        return best

    def _rates(self, shape: BatchShape, step_s: float, room: int) -> "_Rates":
        return _Rates(self._seconds, shape, step_s, room, self._exposed_s, self._rows)

    def _limit(self, seq: Draftable) -> int:
        """Most drafts of a sequence: after them comes one more token."""
        return min(self._most, seq.token_limit - seq.num_tokens - 1)


class _Rates:
    """Tokens a second of a step by its number of drafts."""

    def __init__(
        self,
        seconds: Callable[[BatchShape], float],
        shape: BatchShape,
        step_s: float,
        room: int,
        exposed_s: float,
        rows: PaddedSizes,
    ) -> None:
        """As `SpeculativeDecoding` has them. `shape`: the step without drafts, which takes `step_s`. `room`: most
        drafts of it."""
        self._seconds, self._shape, self._room, self._exposed_s = seconds, shape, room, exposed_s
        self._rows = rows
        self._known_s: dict[int, float] = {0: step_s}  # by number of drafts

    def falling(self, chances: np.ndarray) -> np.ndarray:
        """The probabilities of the step's drafts, falling, as many as it has room for. `chances`: of any shape; 0 is no
        draft."""
        return np.sort(chances[chances > 0.0])[::-1][: self._room]

    def single(self, count: int) -> BatchShape:
        """A step with one token of each of `count` of the step's decodes."""
        return BatchShape.decoding(count, count * self._shape.decode_context // max(1, self._shape.decodes))

    def best(self, chances: np.ndarray, more_s: float = 0.0) -> tuple[int, float]:
        """The number of drafts with the most tokens a second, 0 if none pay; and this rate. `more_s`: time that any
        drafts cost apart from the step."""
        best, most = 0, self._shape.decodes / self._known_s[0]
        falling = self.falling(chances)
        tokens = self._shape.decodes + np.cumsum(falling)
        for count in self._counts(len(falling)):
            rate = tokens[count - 1] / (self._step_s(count) + self._exposed_s + more_s)
            if rate > most:
                best, most = count, rate
        return best, most

    def _counts(self, most: int) -> list[int]:
        """The numbers of drafts that are tried, ascending: `COUNTS` up to `most`, with each the number that fills its
        padding, and `most` itself."""
        tokens, counts = self._shape.tokens, {most} if most else set[int]()
        for count in COUNTS[: bisect_left(COUNTS, most)]:
            counts |= {count, min(self._rows.mixed(tokens + count) - tokens, most)}
        return sorted(counts)

    def _step_s(self, count: int) -> float:
        if count not in self._known_s:
            self._known_s[count] = self._seconds(_with_drafts(self._shape, count))
        return self._known_s[count]


def _chances(guesses: Mapping[int, _Guess]) -> np.ndarray:
    return np.array([*chain.from_iterable(guess.chances for guess in guesses.values())])


def _with_drafts(shape: BatchShape, count: int) -> BatchShape:
    """The step with `count` drafts, spread over its decodes. Which sequence has how many hardly matters. A step without
    decodes stays as it is."""
    drafted = shape.copy()
    if not shape.decodes:
        return drafted
    chunks = min(count, shape.decodes)
    context = shape.decode_context // shape.decodes - 1
    each, longer = divmod(count, chunks)
    drafted.tokens += count
    drafted.decodes -= chunks
    drafted.decode_context -= chunks * (context + 1)
    drafted.chunks += chunks
    drafted.prefixes += chunks * context
    drafted.prefix_products += context * (chunks + count)
    drafted.squares += (chunks - longer) * (1 + each) ** 2 + longer * (2 + each) ** 2
    return drafted
