"""Drafts of what a grammar forces: keys, punctuation, the rest of a choice, the end."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worker.drafts.canonical import CanonicalTokenizer
from worker.drafts.drafter import Drafter, Proposal
from worker.structured_output import GrammarState

_MAX_MATCHER_STEPS = 64  # of the matcher, for one proposal
_BYTES_A_TOKEN = 8
_SPACED = b":,"  # after these, grammars of JSON leave a space to choice
_OPENING = (b'"', b"{", b"[")
_WORDS = (*_OPENING, b"t", b"f", b"n")
_DIGITS = (b"1", b"0", b"-")


class _Following:
    """The drafter's state of one sequence."""

    __slots__ = ("guess_at", "last", "proposed", "spaced", "state")

    def __init__(self, state: GrammarState) -> None:
        self.state = state
        self.last = -1  # the output's last byte
        self.spaced = dict.fromkeys(_SPACED, True)
        self.proposed: list[int] = []
        self.guess_at = -1  # the token of `proposed` that begins with a guess; -1 if there is none


class GrammarDrafter(Drafter):
    """Proposes what the grammar forces, in the tokens that the model would write.

    - Where JSON may have a space or not, the drafter goes on as the sequence did before; first with a space.
    - Where the output can only end, an end token is proposed.
    - A grammar's matcher is the same after a call as before.
    """

    name = "grammar"
    num_evidence = 4
    """By the first token. 0: it is forced, at the beginning of a word. 1: it begins with a guessed space. 2: it is
    forced, within a word: then the model has begun the word in an unusual way. 3: it begins the output."""

    def __init__(self, tokenizer: CanonicalTokenizer) -> None:
        self._tokenizer = tokenizer
        self._following: dict[int, _Following] = {}
        self._bitmask = np.zeros((1, -(-len(tokenizer.token_bytes) // 32)), dtype=np.int32)
        self._end_id = -1  # of the last output that ended

    def add(
        self,
        key: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        prediction_ids: Sequence[int],
        grammar: GrammarState | None,
    ) -> None:
        """Begins with a sequence. Those without a grammar get no proposals."""
        if grammar is not None:
            self._following[key] = _Following(grammar)
            self.extend(key, output_ids[-1:])

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Takes in new output tokens of a sequence."""
        following = self._following.get(key)
        if following is None or not len(token_ids):
            return
        texts, at = self._tokenizer.token_bytes, following.guess_at
        if 0 <= at < len(token_ids) and list(token_ids[:at]) == following.proposed[:at]:
            before = texts[token_ids[at - 1]][-1] if at else following.last
            if before in following.spaced:
                following.spaced[before] = texts[token_ids[at]].startswith(b" ")
        following.guess_at = -1
        following.last = texts[token_ids[-1]][-1] if texts[token_ids[-1]] else -1
        if following.state.terminated:
            self._end_id = token_ids[-1]

    def propose(self, key: int, most: int) -> Proposal:
        """The guess at the tokens after the last known one, at most `most` of them."""
        following = self._following.get(key)
        if following is None or following.state.terminated or most <= 0:
            return Proposal([])
        texts, guess, only = self._texts(following, most * _BYTES_A_TOKEN)
        token_ids: list[int] = []
        following.guess_at = -1
        for i, text in enumerate(texts):
            found = self._tokenizer.encode(text)
            if i == len(only) and not token_ids and found.num_certain == 0:
                # Where a longer token may come, it mostly does. Later in a proposal it seldom does.
                break
            if guess is not None and guess[0] == i:
                following.guess_at = self._token_at(found.token_ids, guess[1], len(token_ids))
            token_ids += found.token_ids
            token_ids += only[i : i + 1]
        del token_ids[most:]
        following.proposed = token_ids
        return Proposal(token_ids, self._evidence(following, texts[0]))

    @staticmethod
    def _evidence(following: _Following, text: bytes) -> int:
        if following.guess_at == 0:
            return 1
        if following.state.num_tokens == 0:
            return 3
        return 2 if text and _in_word(following.last) and _in_word(text[0]) else 0

    def remove(self, key: int) -> None:
        """Forgets a sequence."""
        self._following.pop(key, None)

    def _token_at(self, token_ids: Sequence[int], place: int, before: int) -> int:
        """The token that begins at `place` of the text, counted from `before` on; -1 if none does."""
        at = 0
        for i, token_id in enumerate(token_ids):
            if at >= place:
                return before + i if at == place else -1
            at += len(self._tokenizer.token_bytes[token_id])
        return -1

    def _texts(
        self, following: _Following, most_bytes: int, *, guess: bool = True
    ) -> tuple[list[bytes], tuple[int, int] | None, list[int]]:
        """Texts that follow, with a token after each of them, the last perhaps without, that alone can come there;
        the first guess, by its text and its place in it; and these tokens."""
        matcher, texts, only, first_guess, steps = following.state.matcher, [b""], list[int](), None, 0
        try:
            while steps < _MAX_MATCHER_STEPS and len(texts[-1]) < most_bytes:
                more = forced_bytes(matcher)
                if not more and guess and not (only and not texts[-1]):
                    last = texts[-1][-1] if texts[-1] else following.last
                    if last in following.spaced:
                        more = self._guess(matcher, following.spaced[last])
                        if more and first_guess is None:
                            first_guess = (len(texts) - 1, len(texts[-1]))
                if more:
                    if not matcher.accept_string(more):
                        break
                    texts[-1] += more
                else:
                    token_id = self._only(following.state)
                    if token_id is None:
                        break
                    only.append(token_id)
                    if token_id in following.state.matcher.stop_token_ids or not matcher.accept_token(token_id):
                        break
                    texts.append(b"")
                steps += 1
            return texts, first_guess, only
        finally:
            if steps:
                matcher.rollback(steps)

    def _guess(self, matcher: Any, spaced: bool) -> bytes:
        """A guess where a space may follow or not: the space, if something is forced after it or a number follows;
        without a space, what opens the value."""
        if not matcher.accept_string(b" "):
            return b""
        try:
            if spaced and (forced_bytes(matcher) or self._number_follows(matcher)):
                return b" "
        finally:
            matcher.rollback(1)
        if spaced:
            return b""
        opening = [each for each in _OPENING if _allows(matcher, each)]
        return opening[0] if len(opening) == 1 else b""

    def _number_follows(self, matcher: Any) -> bool:
        """Whether a number follows, and the space before it is a token of its own."""
        return (
            any(_allows(matcher, each) for each in _DIGITS)
            and not any(_allows(matcher, each) for each in _WORDS)
            and len(self._tokenizer.encode(b" 1").token_ids) == 2
        )

    def _only(self, state: GrammarState) -> int | None:
        """The token that alone can follow, where this is worth looking for: the end, or a marker around a call."""
        matcher = state.matcher
        if not (state.param == "tools" or matcher.is_completed()):
            return None
        matcher.fill_next_token_bitmask(self._bitmask)
        words, ends = self._bitmask[0].view(np.uint32), matcher.stop_token_ids
        places = np.flatnonzero(words)
        if len(places) > len(ends) + 1:
            return None
        allowed = {32 * int(at) + bit for at in places for bit in range(32) if int(words[at]) >> bit & 1}
        if allowed and allowed.issubset(ends):
            # Of several end tokens, that of a chat's turn mostly comes last.
            return self._end_id if self._end_id in allowed else max(allowed)
        return allowed.pop() if len(allowed) == 1 else None


def _in_word(byte: int) -> bool:
    return byte >= 0x80 or chr(max(byte, 0)).isalnum()


def forced_bytes(matcher: Any) -> bytes:
    """The text that a grammar's matcher allows alone, as far as it is forced; empty if the next byte is not."""
    try:
        return str(matcher.find_jump_forward_string()).encode()
    except UnicodeDecodeError as error:  # ends or begins within a character
        return bytes(error.object)


def _allows(matcher: Any, text: bytes) -> bool:
    if matcher.accept_string(text):
        matcher.rollback(1)
        return True
    return False
