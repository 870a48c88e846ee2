"""Drafts from texts that came before: the longest suffix of a sequence that occurs elsewhere, and what followed there.

As in suffix decoding (https://arxiv.org/abs/2411.04975), with online suffix automata in place of suffix trees (as
https://arxiv.org/abs/2411.10666), so that suffixes of any length are found.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np

from worker.drafts.drafter import Drafter, Proposal
from worker.structured_output import GrammarState

_SEPARATOR = -1  # a token that no text has
_SPARE_TOKENS = 512  # room for output in a new automaton
_REMATCHED_TOKENS = 32  # tokens by which a suffix is looked for again
_MAX_PROPOSED_TOKENS = 512
_LENGTH_CLASSES = 6


class _Text:
    """The drafter's state of one sequence."""

    __slots__ = ("aligned", "generation", "own", "pending", "places", "prediction", "recent", "reserved", "unread")

    def __init__(self, places: np.ndarray, prediction: Sequence[int]) -> None:
        self.places = places
        self.prediction = prediction
        self.aligned = 0  # tokens of the output, if all are the prediction's; otherwise -1
        self.own: np.ndarray | None = None
        self.reserved = 0  # tokens of all sequences' room that are for this one
        self.unread: deque[tuple[Sequence[int], int]] = deque()  # texts not yet in `own`, from an index on
        self.recent: list[int] = []  # the sequence's last tokens, while there are unread ones
        self.pending: list[int] = []  # output that is in no automaton
        self.generation = 0


class SuffixDrafter(Drafter):
    """Proposes what followed the longest suffix of the sequence's text that occurs elsewhere.

    - Elsewhere is first the sequence's own text, which consists of the client's prediction, the prompt and the output;
      then, for longer suffixes, the recent outputs of all sequences of this replica.
    - Where texts go on differently, the most frequent token is proposed, the latest of equally frequent ones.
    - While the output is the beginning of the prediction, the rest of the prediction is proposed.

    | memory | bytes a token | tokens |
    | --- | --- | --- |
    | own texts | 70, at most 110 | at most `own_tokens`, all sequences together; the ends of prompts for which there is room |
    | outputs | 70, at most 110 | at most `shared_tokens`, in two generations: when the newer is full, the older is dropped |

    All work is done in `propose`, on at most `tokens_a_call` tokens a call, so that long prompts are read over several
    calls. Sequences for which nothing is proposed cost nothing until then.
    """  # noqa: E501

    name = "suffix"
    num_evidence = 2 * _LENGTH_CLASSES + 1
    """By length of the suffix (1, 2, 3-4, 5-8, 9-16, 17 and more), first of own text, then of the replica's; the last
    is for the beginning of a prediction."""

    def __init__(self, *, own_tokens: int = 2 << 20, shared_tokens: int = 1 << 20, tokens_a_call: int = 1024) -> None:
        """Compiles the automata's functions, if this was not done before: some seconds."""
        from worker.drafts import suffix_automaton

        self._automata = suffix_automaton
        self._tokens_a_call = tokens_a_call
        self._free_tokens = own_tokens
        self._generation_tokens = max(1, shared_tokens // 2)
        self._none = suffix_automaton.new_automaton(0)
        self._new = suffix_automaton.new_automaton(self._generation_tokens)
        self._old = self._none
        self._generation = 0
        self._texts: dict[int, _Text] = {}
        self._outputs: deque[tuple[int, int, list[int]]] = deque()  # of ended sequences: generation, last state, tokens
        self._waiting_tokens = 0
        self._tokens = np.zeros(_MAX_PROPOSED_TOKENS, dtype=np.int32)
        self._found = np.zeros(suffix_automaton.NUM_FOUND, dtype=np.int32)

    def add(
        self,
        key: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        prediction_ids: Sequence[int],
        grammar: GrammarState | None,
    ) -> None:
        """Begins with a sequence. The prompt is read later, and is not to be changed until `remove`."""
        text = _Text(np.zeros(self._automata.NUM_PLACES, dtype=np.int32), prediction_ids)
        text.generation = self._generation
        output_ids = list(output_ids)
        if prediction_ids:
            text.unread += (prediction_ids, 0), ([_SEPARATOR], 0)
        text.unread += (prompt_ids, 0), (output_ids, 0)
        text.recent = [*prompt_ids[-_REMATCHED_TOKENS:], *output_ids][-_REMATCHED_TOKENS:]
        self._align(text, output_ids)
        if output_ids:
            self._rematch_shared(text, output_ids[-_REMATCHED_TOKENS:])
        self._texts[key] = text

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Takes in new output tokens of a sequence."""
        text = self._texts[key]
        text.pending += token_ids
        if text.aligned >= 0:
            self._align(text, token_ids)

    def propose(self, key: int, most: int) -> Proposal:
        """The guess at the tokens after the last known one, at most `most` of them."""
        text = self._texts[key]
        most = min(most, _MAX_PROPOSED_TOKENS)
        if most <= 0:
            return Proposal([])
        known = self._catch_up(text)
        if text.aligned >= 0 and text.aligned < len(text.prediction):
            ahead = islice(text.prediction, text.aligned, text.aligned + most)
            return Proposal(list(ahead), 2 * _LENGTH_CLASSES)
        if not known:
            return Proposal([])
        own = self._none if text.own is None else text.own
        count = self._automata.propose(own, self._new, self._old, text.places, most, self._tokens, self._found)
        if not count:
            return Proposal([])
        length, shared = int(self._found[0]), int(self._found[1])
        return Proposal(
            self._tokens[:count].tolist(),
            shared * _LENGTH_CLASSES + min(_LENGTH_CLASSES - 1, (length - 1).bit_length()),
        )

    def remove(self, key: int) -> None:
        """Forgets a sequence. Its output is kept for others."""
        text = self._texts.pop(key)
        self._free_tokens += text.reserved
        if text.pending:
            last = int(text.places[self._automata.NEW_LAST])
            self._outputs.append((text.generation, last, text.pending))
            self._waiting_tokens += len(text.pending)
            while self._waiting_tokens > self._generation_tokens:
                self._waiting_tokens -= len(self._outputs.popleft()[2])

    # ---------------------------------------------------------------- reading

    def _catch_up(self, text: _Text) -> bool:
        """Reads what is new of a sequence, as much as a call may. Returns whether all of its output was read."""
        room = self._tokens_a_call
        if text.pending:
            taken, text.pending = text.pending[:room], text.pending[room:]
            self._follow(text, taken)
            room -= len(taken)
        if text.unread and room > 0:
            room -= self._read_unread(text, room)
        while self._outputs and room > 0:
            room -= self._read_ended(room)
        return not text.pending

    def _follow(self, text: _Text, token_ids: list[int]) -> None:
        """Reads output."""
        tokens = np.array(token_ids, dtype=np.int32)
        self._make_shared_room(len(token_ids))
        if text.generation != self._generation:
            self._move(text)
        own = self._none
        if text.unread:
            text.unread.append((token_ids, 0))
            text.recent = [*text.recent, *token_ids][-_REMATCHED_TOKENS:]
        elif text.own is not None:
            own = self._own_with_room(text, len(token_ids))
        self._automata.follow(own, self._new, self._old, text.places, tokens)

    def _read_ended(self, room: int) -> int:
        """Reads the output of a sequence that has ended, at most `room` tokens. Returns how many."""
        generation, last, token_ids = self._outputs.popleft()
        taken, rest = token_ids[:room], token_ids[room:]
        self._waiting_tokens -= len(taken)
        self._make_shared_room(len(taken))
        last = last if generation == self._generation else 0
        last = self._automata.extend(self._new, np.array(taken, dtype=np.int32), last, 1)
        if rest:
            self._outputs.appendleft((self._generation, last, rest))
        return len(taken)

    def _read_unread(self, text: _Text, room: int) -> int:
        """Reads own text, at most `room` tokens. Returns how many."""
        automata, places, done = self._automata, text.places, 0
        if text.own is None and not self._make_own(text):
            text.unread.clear()
            return 0
        while text.unread and done < room:
            piece, start = text.unread.popleft()
            tokens = np.array(piece[start : start + room - done], dtype=np.int32)
            if start + len(tokens) < len(piece):
                text.unread.appendleft((piece, start + len(tokens)))
            own = self._own_with_room(text, len(tokens))
            if own is self._none:
                break
            places[automata.OWN_LAST] = automata.extend(own, tokens, int(places[automata.OWN_LAST]), 1)
            done += len(tokens)
        if text.unread:
            self._rematch_own(text)
        elif text.own is not None:
            places[automata.OWN_LENGTH] = -1
            text.recent = []
        return done

    # ---------------------------------------------------------------- room

    def _make_own(self, text: _Text) -> bool:
        """Reserves room for a sequence's own text. If there is not enough, the beginning of the prompt is left out.
        Returns whether there is any room."""
        if self._free_tokens <= _SPARE_TOKENS:
            return False
        wanted = sum(len(piece) for piece, _ in text.unread)
        capacity = min(wanted + _SPARE_TOKENS, self._free_tokens)
        left_out = wanted + _SPARE_TOKENS - capacity
        while left_out > 0:
            piece, _ = text.unread.popleft()
            if len(piece) > left_out:
                text.unread.appendleft((piece, left_out))
            left_out -= len(piece)
        self._free_tokens -= capacity
        text.reserved = capacity
        text.own = self._automata.new_automaton(capacity)
        return True

    def _own_with_room(self, text: _Text, count: int) -> np.ndarray:
        """The sequence's own automaton with room for `count` tokens; an empty one without room if there is none left
        for all sequences together."""
        automata, own = self._automata, text.own
        if own is None:
            return self._none
        used = int(own[automata.TOKENS])
        if used + count > text.reserved:
            more = min(text.reserved + count, self._free_tokens)
            if used + count > text.reserved + more:
                self._free_tokens += text.reserved
                text.own, text.reserved = None, 0
                text.unread.clear()
                text.places[: automata.NEW_LAST] = 0
                return self._none
            self._free_tokens -= more
            text.reserved += more
            text.own = own = automata.grown(own, text.reserved)
        return own

    def _make_shared_room(self, count: int) -> None:
        """Begins a new generation if the newer one has no room for `count` tokens."""
        if int(self._new[self._automata.TOKENS]) + count > self._generation_tokens:
            self._old = self._new
            self._new = self._automata.new_automaton(max(count, self._generation_tokens))
            self._generation += 1

    def _move(self, text: _Text) -> None:
        """Follows a sequence into the present generation."""
        automata, places = self._automata, text.places
        if text.generation == self._generation - 1:
            places[automata.OLD_STATE] = places[automata.NEW_STATE]
            places[automata.OLD_LENGTH] = places[automata.NEW_LENGTH]
        else:
            places[automata.OLD_STATE] = places[automata.OLD_LENGTH] = 0
        places[automata.NEW_LAST] = places[automata.NEW_STATE] = places[automata.NEW_LENGTH] = 0
        text.generation = self._generation

    # ---------------------------------------------------------------- matching

    def _rematch_own(self, text: _Text) -> None:
        automata, places = self._automata, text.places
        if text.own is not None:
            tokens = np.array(text.recent, dtype=np.int32)
            places[automata.OWN_STATE], places[automata.OWN_LENGTH] = automata.match(text.own, tokens, 0, 0)

    def _rematch_shared(self, text: _Text, token_ids: list[int]) -> None:
        automata, places = self._automata, text.places
        tokens = np.array(token_ids, dtype=np.int32)
        places[automata.NEW_STATE], places[automata.NEW_LENGTH] = automata.match(self._new, tokens, 0, 0)
        places[automata.OLD_STATE], places[automata.OLD_LENGTH] = automata.match(self._old, tokens, 0, 0)

    @staticmethod
    def _align(text: _Text, token_ids: Sequence[int]) -> None:
        """Counts how much of the prediction has come true."""
        for token_id in token_ids:
            if text.aligned >= len(text.prediction) or token_id != text.prediction[text.aligned]:
                text.aligned = -1
                return
            text.aligned += 1
