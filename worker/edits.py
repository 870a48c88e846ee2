"""What a request changes in single logits before its token is chosen: penalties of what was said, biases, bans."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.transfer import all_to_device
from worker.messages import SamplingParams

# Taken off the logits of tokens that must not come yet. Finite, so that they still come where a grammar leaves nothing
# else; far below any bias, so that otherwise their probability is 0.
_BAN = 1e6


class History:
    """The different tokens that a row's penalties look at, and how often each was output."""

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> None:
        self._ids = np.empty(256, dtype=np.int64)
        self._counts = np.empty(256, dtype=np.float32)
        self._places: dict[int, int] = {}
        for token_id in dict.fromkeys(prompt_ids):
            self.add(token_id, 0)
        for token_id in output_ids:
            self.add(token_id, 1)

    @property
    def ids(self) -> np.ndarray:
        """int64[n]."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """float32[n]: 0 for a token that only the prompt has."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int, times: int) -> None:
        """A token was output `times` more; 0 for one of the prompt."""
        place = self._places.get(token_id)
        if place is not None:
            self._counts[place] += times
            return
        size = len(self._places)
        if size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[size], self._counts[size] = token_id, times
        self._places[token_id] = size


class Edits(NamedTuple):
    """Of one row: its history if it has penalties; ids and values of its biases; ids that are banned for now."""

    params: SamplingParams
    history: History | None
    bias: tuple[np.ndarray, np.ndarray] | None
    bans: np.ndarray | None


def apply_edits(logits: torch.Tensor, rows: Sequence[int], edits: Sequence[Edits]) -> None:
    """Changes the `rows` of `logits` float32[n, vocab] in place: penalties, then biases, then bans."""
    both = list(zip(rows, edits, strict=True))
    penalised = [(row, e.history, e.params) for row, e in both if e.history is not None and len(e.history.ids)]
    if penalised:
        _penalise(logits, penalised)
    biased = [(row, *e.bias) for row, e in both if e.bias is not None]
    if biased:
        added = np.concatenate([values for _, _, values in biased])
        *at, values = all_to_device([*_places([(row, ids) for row, ids, _ in biased]), added], logits.device)
        logits[tuple(at)] += values
    banned = [(row, e.bans) for row, e in both if e.bans is not None]
    if banned:
        logits[tuple(all_to_device(_places(banned), logits.device))] -= _BAN


def _penalise(logits: torch.Tensor, rows: list[tuple[int, History, SamplingParams]]) -> None:
    """The repetition penalty of prompt and output (Keskar et al., CTRL, 2019, as in transformers: a positive logit is
    divided by it, a negative one multiplied), then presence and frequency penalties of the output (OpenAI's API)."""
    each = np.array([[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for _, _, p in rows])
    arrays = [
        *_places([(row, history.ids) for row, history, _ in rows]),
        np.concatenate([history.counts for _, history, _ in rows]),
        np.repeat(np.arange(len(rows)), [len(history.ids) for _, history, _ in rows]),
        each.astype(np.float32),
    ]
    row, column, counts, which, penalties = all_to_device(arrays, logits.device)
    repetition, presence, frequency = penalties[which].unbind(dim=1)
    values = logits[row, column]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[row, column] = values - frequency * counts - presence * (counts > 0)


def _places(rows: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
    """Row and column, int64[n] each, of the tokens of each row."""
    sizes = [len(ids) for _, ids in rows]
    return [np.repeat(np.array([row for row, _ in rows], dtype=np.int64), sizes), np.concatenate([i for _, i in rows])]
