"""Changes to single logits before a token is chosen: penalties for repetition, biases and bans of tokens."""

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.host_device import all_to_device
from worker.messages import SamplingParams

# Subtracted from the logits of banned tokens. Finite, so that these tokens can still be chosen where a grammar allows
# no other. Far larger than any bias, so that otherwise their probability is 0.
_BAN = 1e6


class TokenCounts:
    """Distinct tokens that a sequence's penalties apply to, and how often each was output."""

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> None:
        self._ids = np.empty(256, dtype=np.int64)
        self._counts = np.empty(256, dtype=np.float32)
        self._index_of: dict[int, int] = {}
        for token_id in dict.fromkeys(prompt_ids):
            self.add(token_id, 0)
        for token_id in output_ids:
            self.add(token_id, 1)

    def copy(self) -> "TokenCounts":
        """The same counts, to be changed apart from these."""
        other = TokenCounts((), ())
        other._ids, other._counts, other._index_of = self._ids.copy(), self._counts.copy(), dict(self._index_of)
        return other

    @property
    def ids(self) -> np.ndarray:
        """int64[n]."""
        return self._ids[: len(self._index_of)]

    @property
    def counts(self) -> np.ndarray:
        """float32[n]: 0 for a token that only the prompt has."""
        return self._counts[: len(self._index_of)]

    def add(self, token_id: int, times: int) -> None:
        """Adds `times` outputs of a token: 0 for a token of the prompt."""
        index = self._index_of.get(token_id)
        if index is not None:
            self._counts[index] += times
            return
        size = len(self._index_of)
        if size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[size], self._counts[size] = token_id, times
        self._index_of[token_id] = size


class BadWords:
    """Sequences of tokens that an output must not have: its last token is banned where all others are there."""

    def __init__(self, words: Iterable[Sequence[int]], output_ids: Sequence[int]) -> None:
        self._words = [tuple(word) for word in words]
        self._longest = max(map(len, self._words)) - 1
        self._last = tuple(output_ids[len(output_ids) - min(self._longest, len(output_ids)) :])

    def after(self, token_id: int) -> "BadWords":
        """The same words, after a further token of the output."""
        other = copy.copy(self)
        other.add(token_id)
        return other

    def add(self, token_id: int) -> None:
        """Takes in a token of the output."""
        self._last = (*self._last, token_id)[-self._longest :] if self._longest else ()

    @property
    def banned(self) -> np.ndarray:
        """The tokens, int64[n], that would complete a word now."""
        last = self._last
        found = {word[-1] for word in self._words if len(word) == 1 or last[-len(word) + 1 :] == word[:-1]}
        return np.array(sorted(found), dtype=np.int64)


class LogitsAdjustments(NamedTuple):
    """Changes to one row of logits.

    | field | meaning |
    | --- | --- |
    | `params` | the strengths of the penalties |
    | `history` | the tokens that penalties apply to, None without penalties |
    | `bias` | token ids (int64) and the values (float32) added to their logits, or None |
    | `suppressed` | token ids (int64) that are banned for now, or None |
    | `allowed` | token ids (int64) besides which all are banned, or None |
    """

    params: SamplingParams
    history: TokenCounts | None
    bias: tuple[np.ndarray, np.ndarray] | None
    suppressed: np.ndarray | None
    allowed: np.ndarray | None = None


def apply_logits_adjustments(
    logits: torch.Tensor, rows: Sequence[int], adjustments: Sequence[LogitsAdjustments]
) -> None:
    """Applies `adjustments[i]` to row `rows[i]` of `logits` float32[n, vocab], in place: penalties, then biases, then
    bans."""
    both = list(zip(rows, adjustments, strict=True))
    penalized = [(row, e.history, e.params) for row, e in both if e.history is not None and len(e.history.ids)]
    if penalized:
        _penalize(logits, penalized)
    biased = [(row, *e.bias) for row, e in both if e.bias is not None]
    if biased:
        added = np.concatenate([values for _, _, values in biased])
        *at, values = all_to_device([*_rows_and_columns([(row, ids) for row, ids, _ in biased]), added], logits.device)
        logits[tuple(at)] += values
    banned = [(row, e.suppressed) for row, e in both if e.suppressed is not None]
    if banned:
        logits[tuple(all_to_device(_rows_and_columns(banned), logits.device))] -= _BAN
    limited = [(row, e.allowed) for row, e in both if e.allowed is not None]
    if limited:
        arrays = [*_rows_and_columns(limited), np.array([row for row, _ in limited], dtype=np.int64)]
        *at, whole = all_to_device(arrays, logits.device)
        kept = logits[tuple(at)]
        logits[whole] -= _BAN
        logits[tuple(at)] = kept


def _penalize(logits: torch.Tensor, rows: list[tuple[int, TokenCounts, SamplingParams]]) -> None:
    """Applies the penalties.

    1. Repetition, over prompt and output (Keskar et al., CTRL, 2019): as in transformers, a positive logit is divided
       by the penalty, a negative one multiplied with it.
    2. Presence and frequency, over the output alone (OpenAI's API).
    """
    each = np.array([[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for _, _, p in rows])
    arrays = [
        *_rows_and_columns([(row, history.ids) for row, history, _ in rows]),
        np.concatenate([history.counts for _, history, _ in rows]),
        np.repeat(np.arange(len(rows)), [len(history.ids) for _, history, _ in rows]),
        each.astype(np.float32),
    ]
    row, column, counts, which, penalties = all_to_device(arrays, logits.device)
    repetition, presence, frequency = penalties[which].unbind(dim=1)
    values = logits[row, column]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[row, column] = values - frequency * counts - presence * (counts > 0)


def _rows_and_columns(rows: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
    """Rows and columns, int64[n] each, of all tokens listed for each row."""
    sizes = [len(ids) for _, ids in rows]
    return [np.repeat(np.array([row for row, _ in rows], dtype=np.int64), sizes), np.concatenate([i for _, i in rows])]
