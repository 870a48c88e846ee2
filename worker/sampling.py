"""From logits to tokens: penalties, biases, grammars, temperature and filters for a batch whose rows want different
things. What a row gets depends on its own logits, parameters, history and seed, and on nothing else in the batch."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from worker.draw import draw, uniform
from worker.grammar import GrammarError, GrammarState, apply_bitmask, new_bitmask
from worker.messages import Failure, SamplingParams, TokenLogprobs

# Taken off the logits of tokens that must not come yet. Finite, so that they still come where a grammar leaves nothing
# else; far below any bias, so that otherwise their probability is 0.
_BAN = 1e6
# Below this temperature the likeliest token is taken: it is what the division leaves, without overflow.
_GREEDY_BELOW = 1e-5
_PROMPT_ROWS = 128  # rows of the vocabulary's width that `prompt_logprobs` copies at a time


@dataclass(slots=True)
class Sampled:
    """What a row got. With a `failure`, which is the row's alone, there is no token: `token_id` is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    failure: Failure | None = None


@dataclass(slots=True)
class _History:
    """The different tokens that a row's penalties look at, and how often each was output."""

    ids: np.ndarray
    counts: np.ndarray
    size: int = 0
    places: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt_ids: Iterable[int], output_ids: Iterable[int]) -> "_History":
        history = cls(np.empty(256, dtype=np.int64), np.empty(256, dtype=np.float32))
        for token_id in dict.fromkeys(prompt_ids):
            history.add(token_id, 0)
        for token_id in output_ids:
            history.add(token_id, 1)
        return history

    def add(self, token_id: int, times: int) -> None:
        place = self.places.get(token_id)
        if place is not None:
            self.counts[place] += times
            return
        if self.size == len(self.ids):
            self.ids = np.concatenate([self.ids, np.empty_like(self.ids)])
            self.counts = np.concatenate([self.counts, np.empty_like(self.counts)])
        self.ids[self.size], self.counts[self.size] = token_id, times
        self.places[token_id] = self.size
        self.size += 1


class _Row:
    """A slot's parameters and history."""

    __slots__ = ("bans", "bias", "grammar", "greedy", "history", "num_output", "params", "plain", "seed")

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
        self.num_output = len(output_ids)
        self.greedy = params.temperature < _GREEDY_BELOW
        self.seed = int.from_bytes(os.urandom(8)) >> 1 if params.seed is None else params.seed % 2**64
        repeats = params.repetition_penalty != 1
        self.history: _History | None = None
        if repeats or params.presence_penalty or params.frequency_penalty:
            self.history = _History.of(prompt_ids if repeats else (), output_ids)
        self.bans: np.ndarray | None = None
        if params.min_tokens > self.num_output:
            self.bans = np.array(sorted({*eos_token_ids, *params.stop_token_ids}), dtype=np.int64)
        self.bias: tuple[np.ndarray, np.ndarray] | None = None
        if params.logit_bias:
            ids = np.array(list(params.logit_bias), dtype=np.int64)
            self.bias = ids, np.array(list(params.logit_bias.values()), dtype=np.float32)
        # Nothing but the logits decides.
        self.plain = self.greedy and all(x is None for x in (self.history, self.bans, self.bias, grammar))

    def take(self, token_id: int) -> None:
        """Counts a token. Raises GrammarError if the grammar does not allow it."""
        self.num_output += 1
        if self.history is not None:
            self.history.add(token_id, 1)
        if self.bans is not None and self.num_output >= self.params.min_tokens:
            self.bans = None
        if self.grammar is not None:
            self.grammar.accept(token_id)


class Sampler:
    """Chooses the next token of every running sequence and keeps what that depends on, by slot."""

    def __init__(self, max_running: int, vocab_size: int, device: torch.device | str) -> None:
        """Slots go from 0 to `max_running` - 1; logits have `vocab_size` columns and lie on `device`."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows: list[_Row | None] = [None] * max_running
        self._bitmask = new_bitmask(max_running, vocab_size)

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
        self._rows[slot] = _Row(sampling, prompt_ids, output_ids, eos_token_ids, grammar)

    def remove(self, slot: int) -> None:
        """Forgets a slot's sequence. A slot that is free stays free."""
        self._rows[slot] = None

    def sample(self, logits: torch.Tensor, slots: list[int]) -> list[Sampled]:
        """One token for each of `slots`, row i of `logits` float32[n, vocab_size] being that of `slots[i]`. The logits
        stay as they are. A row without a token (logits that are no numbers, a grammar that allows nothing) says so in
        its `failure`, and the others are none the worse."""
        rows = [self._row(slot) for slot in slots]
        special = [i for i, row in enumerate(rows) if not row.plain]
        failures: dict[int, Failure] = {}
        if len(special) < len(rows):
            tokens = _argmax(logits)
        else:
            tokens = np.zeros(len(rows), dtype=np.int64)
        if special:
            tokens[special] = self._choose(logits, special, [rows[i] for i in special], failures)
        for i in np.flatnonzero(~_finite(logits)):
            failures[int(i)] = Failure("internal", "the model's output is not a number")
        return self._finish(logits, rows, tokens, failures)

    def _row(self, slot: int) -> _Row:
        row = self._rows[slot]
        if row is None:
            raise ValueError(f"slot {slot} is free")
        return row

    def _choose(
        self, logits: torch.Tensor, indices: list[int], rows: list[_Row], failures: dict[int, Failure]
    ) -> np.ndarray:
        """Tokens, int64, of the rows of `logits` at `indices`; those to which a grammar leaves none are `failures`."""
        if len(indices) == len(logits):
            work = logits.clone()
        else:
            work = logits.index_select(0, torch.tensor(indices, device=logits.device))
        _penalise(work, rows)
        _bias(work, rows)
        _ban(work, rows)
        for i, failure in self._mask(work, rows).items():
            failures[indices[i]] = failure
        tokens = np.zeros(len(rows), dtype=np.int64)
        greedy = [i for i, row in enumerate(rows) if row.greedy]
        if greedy:
            tokens[greedy] = _argmax(_take_rows(work, greedy))
        random = [i for i, row in enumerate(rows) if not row.greedy]
        if random:
            tokens[random] = _draw_rows(_take_rows(work, random), [rows[i] for i in random])
        return tokens

    def _mask(self, work: torch.Tensor, rows: list[_Row]) -> dict[int, Failure]:
        """Sets to -inf what the rows' grammars do not allow. Returns what went wrong, by row."""
        wrong: dict[int, Failure] = {}
        masked = []
        for i, row in enumerate(rows):
            if row.grammar is None:
                continue
            try:
                if row.grammar.fill(self._bitmask[i]):
                    masked.append(i)
            except GrammarError as error:
                wrong[i] = Failure("invalid", str(error), row.grammar.param)
        if masked:
            apply_bitmask(work, self._bitmask[: len(work)], masked)
        return wrong

    def _finish(
        self, logits: torch.Tensor, rows: list[_Row], tokens: np.ndarray, failures: dict[int, Failure]
    ) -> list[Sampled]:
        """Counts the tokens and makes the answer."""
        sampled = []
        for i, (row, token_id) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if i not in failures:
                try:
                    row.take(token_id)
                except GrammarError as error:
                    failures[i] = Failure("internal", f"a token was taken that must not be: {error}")
            sampled.append(Sampled(-1, failure=failures[i]) if i in failures else Sampled(token_id))
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None and i not in failures]
        if wanted:
            top = [rows[i].params.logprobs or 0 for i in wanted]
            for i, logprobs in zip(wanted, _logprobs(_take_rows(logits, wanted), tokens[wanted], top), strict=True):
                sampled[i].logprobs = logprobs
        return sampled


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Of given tokens: row i of `logits` float32[n, vocab] is the distribution that `token_ids[i]` came from. With the
    `k` likeliest of each."""
    out: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _PROMPT_ROWS):
        ids = np.array(token_ids[start : start + _PROMPT_ROWS], dtype=np.int64)
        out += _logprobs(logits[start : start + len(ids)], ids, [k] * len(ids))
    return out


def _take_rows(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if len(rows) == len(matrix):
        return matrix
    return matrix.index_select(0, torch.tensor(rows, device=matrix.device))


def _argmax(logits: torch.Tensor) -> np.ndarray:
    """torch.argmax; on a CPU through NumPy, which has the same answer 13 times as fast (the first of equals, a NaN
    before everything)."""
    if logits.device.type == "cpu":
        return logits.numpy().argmax(axis=1)
    return logits.argmax(dim=1).cpu().numpy()


def _finite(logits: torch.Tensor) -> np.ndarray:
    """Which rows can be a distribution: no NaN, no +inf, and not all -inf."""
    return logits.amax(dim=1).isfinite().cpu().numpy()


def _draw_rows(work: torch.Tensor, rows: list[_Row]) -> np.ndarray:
    """Random tokens of rows with their own temperatures and filters. Overwrites `work`."""
    params = [row.params for row in rows]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=work.device)
    probs = torch.softmax(work.div_(temperature[:, None]), dim=1)
    # Nothing is possible, or the logits are no numbers: the row has failed, or will when its grammar sees the token.
    probs[probs[:, 0].isnan()] = 1.0 / probs.shape[1]
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    positions = np.array([row.num_output for row in rows], dtype=np.uint64)
    return draw(
        probs.cpu().numpy(),
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
        uniform(seeds, positions),
    )


# ---------------------------------------------------------------- what changes single logits


def _edit(work: torch.Tensor, rows: list[int], ids: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in `work` the tokens `ids[j]` of row `rows[j]` are."""
    row = np.repeat(np.array(rows, dtype=np.int64), [len(x) for x in ids])
    return torch.from_numpy(row).to(work.device), torch.from_numpy(np.concatenate(ids)).to(work.device)


def _spread(values: list[float], ids: list[np.ndarray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), [len(x) for x in ids])).to(device)


def _penalise(work: torch.Tensor, rows: list[_Row]) -> None:
    """The repetition penalty of prompt and output (Keskar et al., CTRL, 2019, as in transformers: a positive logit is
    divided by it, a negative one multiplied), then presence and frequency penalties of the output (OpenAI's API)."""
    some = [(i, row.history, row.params) for i, row in enumerate(rows) if row.history is not None and row.history.size]
    if not some:
        return
    indices = [i for i, _, _ in some]
    ids = [history.ids[: history.size] for _, history, _ in some]
    at = _edit(work, indices, ids)
    counts = torch.from_numpy(np.concatenate([h.counts[: h.size] for _, h, _ in some])).to(work.device)
    repetition = _spread([p.repetition_penalty for _, _, p in some], ids, work.device)
    presence = _spread([p.presence_penalty for _, _, p in some], ids, work.device)
    frequency = _spread([p.frequency_penalty for _, _, p in some], ids, work.device)
    values = work[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    work[at] = values - frequency * counts - presence * (counts > 0)


def _bias(work: torch.Tensor, rows: list[_Row]) -> None:
    some = [(i, *row.bias) for i, row in enumerate(rows) if row.bias is not None]
    if some:
        at = _edit(work, [i for i, _, _ in some], [ids for _, ids, _ in some])
        work[at] += torch.from_numpy(np.concatenate([values for _, _, values in some])).to(work.device)


def _ban(work: torch.Tensor, rows: list[_Row]) -> None:
    some = [(i, row.bans) for i, row in enumerate(rows) if row.bans is not None]
    if some:
        work[_edit(work, [i for i, _ in some], [ids for _, ids in some])] -= _BAN


# ---------------------------------------------------------------- log probabilities


def _logprobs(logits: torch.Tensor, token_ids: np.ndarray, top: list[int]) -> list[TokenLogprobs]:
    """Of the model's own distribution: `token_ids[i]`'s and those of the `top[i]` likeliest."""
    logprobs = torch.log_softmax(logits, dim=1)
    chosen = logprobs.gather(1, torch.from_numpy(token_ids).to(logits.device)[:, None])[:, 0].tolist()
    best = torch.topk(logprobs, min(max(top), logits.shape[1]), dim=1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token_id, logprob, list(zip(ids[:k], values[:k], strict=True)))
        for token_id, logprob, k, (ids, values) in zip(token_ids.tolist(), chosen, top, pairs, strict=True)
    ]
