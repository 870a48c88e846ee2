"""The values that pass between scheduler, executor and sampler in one step.

| value | from | to | content |
| --- | --- | --- | --- |
| `Plan` | scheduler | every rank | which tokens to compute, in which pages |
| `SampledTokens` | sampler | scheduler | the next tokens |
| `PooledChunks` | sampler | scheduler | sums of hidden states, for embeddings |
| `StepTime` | every stage | the engine's `StageTimeline` | when a step was computed |

Nothing but plans passes from the scheduler to the ranks. Ranks that apply the same plans in the same order hold the
same page tables.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipeline.meter import Span
from worker.messages import Failure, TokenLogprobs

# Token id of a token that a step in flight samples. The host does not know its value yet; the device reads it from
# `last_tokens[slot]`.
PENDING = -1
# Limit per step of prompt tokens with log probabilities: each gives a row of logits, vocabulary x 4 bytes.
PROMPT_LOGIT_ROWS = 256
# Limit per step of prompt tokens whose hidden states are averaged: each gives a row of hidden states.
HIDDEN_ROWS = 2048


NUM_COLUMNS = 6  # of a plan: arrays with an entry for each chunk
NOTHING_HIDDEN = np.empty((0, 2), dtype=np.int32)
NO_COPIES = np.empty((0, 7), dtype=np.int32)
NO_ADAPTERS = np.empty((0, 3), dtype=np.int32)


class Chunk(NamedTuple):
    """The part of one sequence that a step computes: positions `start` to `start + len(token_ids) - 1`.

    | field | meaning |
    | --- | --- |
    | `slot` | row in the ranks' page tables and in the sampler, the sequence's from start to end or preemption |
    | `start` | position of the first token |
    | `token_ids` | the tokens; `[PENDING]` if the token is to be read on the device |
    | `num_kept_pages` | before the step runs, the row of the page table is cut to this number of pages |
    | `pages` | then these pages are appended |
    | `num_logits` | number of the chunk's last tokens that give a row of logits each |
    | `num_hidden` | number of the chunk's last tokens that give their hidden state, for pooling |

    `num_logits` is 0 in the middle of a prompt and in a pooled prompt, 1 if the next token is sampled, and more if log
    probabilities of the prompt are asked for. A chunk with drafts has the last known token first, the drafts after it,
    and logits at each. The KV of token i of a sequence is in page `table[i // page_size]` at
    offset `i % page_size`.
    """

    slot: int
    start: int
    token_ids: list[int]
    num_kept_pages: int
    pages: list[int]
    num_logits: int
    num_hidden: int = 0


class Copy(NamedTuple):
    """A unit of the cache, or a column of units, that a step copies from one place to another.

    | field | meaning |
    | --- | --- |
    | `chunk`, `position` | index of a chunk: after its tokens before this position. At its first, before it computes anything |
    | `group` | number of the group in the layout |
    | `from_tier`, `from_unit` | what is copied: a page or row of a tier of the group (`worker.kv_layout`), of `SLOT` that of the slot |
    | `to_tier`, `to_unit` | where to |
    """  # noqa: E501

    chunk: int
    position: int
    group: int
    from_tier: int
    from_unit: int
    to_tier: int
    to_unit: int


@dataclass(slots=True, eq=False)
class Plan:
    """The plan of one step: chunks of different sequences, in the order in which their logits come back.

    The fields of `Chunk` as columns, because most steps have hundreds of chunks of one token. Arrays are int32.

    | field | shape | meaning |
    | --- | --- | --- |
    | `step` | | number of the step |
    | `slots`, `starts`, `num_logits`, `num_kept_pages` | [chunks] | as in `Chunk` |
    | `lengths`, `num_pages` | [chunks] | number of the chunk's tokens and of its new pages |
    | `token_ids` | [sum of `lengths`] | tokens of all chunks, concatenated |
    | `pages` | [groups, sum of `num_pages`] | new pages of all chunks, concatenated, for each group with pages of the layout (`worker.kv_layout`) |
    | `hidden` | [pooled chunks, 2] | index and `num_hidden` of each chunk that has any |
    | `copies` | [copies, 7] | the fields of `Copy` |
    | `adapters` | [chunks with an adapter, 3] | index of a chunk, device slot, number of the adapter: a rank that has another one there copies this one first |
    """  # noqa: E501

    step: int
    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    num_logits: np.ndarray
    num_kept_pages: np.ndarray
    num_pages: np.ndarray
    token_ids: np.ndarray
    pages: np.ndarray
    hidden: np.ndarray = field(default_factory=lambda: NOTHING_HIDDEN)
    copies: np.ndarray = field(default_factory=lambda: NO_COPIES)
    adapters: np.ndarray = field(default_factory=lambda: NO_ADAPTERS)

    @classmethod
    def from_chunks(cls, step: int, chunks: Iterable[Chunk]) -> "Plan":
        """The plan of the given chunks, for a layout with one group of pages."""
        slots, starts, token_ids, num_kept, pages, num_logits, num_hidden = zip(*chunks, strict=True)
        lengths, num_pages = [len(ids) for ids in token_ids], [len(some) for some in pages]
        flat = [[i for some in column for i in some] for column in (token_ids, pages)]
        columns = (slots, starts, lengths, num_logits, num_kept, num_pages, *flat)
        arrays = [np.array(column, dtype=np.int32) for column in columns]
        arrays[-1] = arrays[-1][None]
        hidden = [pair for pair in enumerate(num_hidden) if pair[1]]
        arrays.append(np.array(hidden, dtype=np.int32).reshape(-1, 2))
        return cls(step, *arrays)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def has_pending_tokens(self) -> bool:
        """Whether a token is pending."""
        return bool((self.token_ids == PENDING).any())

    @property
    def adapter_slots(self) -> np.ndarray:
        """Device slot of each chunk's adapter, -1 without one: int32 [chunks]."""
        slots = np.full(len(self), -1, dtype=np.int32)
        slots[self.adapters[:, 0]] = self.adapters[:, 1]
        return slots

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks one by one, with pages of the first group. Slow: for tests."""
        token_ids = np.split(self.token_ids, np.cumsum(self.lengths)[:-1])
        pages = np.split(self.pages[0], np.cumsum(self.num_pages)[:-1])
        columns = (self.slots.tolist(), self.starts.tolist(), token_ids, self.num_kept_pages.tolist(), pages)
        hidden = dict(self.hidden.tolist())
        return [
            Chunk(slot, start, ids.tolist(), kept, some.tolist(), num, hidden.get(index, 0))
            for index, (slot, start, ids, kept, some, num) in enumerate(
                zip(*columns, self.num_logits.tolist(), strict=True)
            )
        ]

    def only(self, chosen: np.ndarray) -> "Plan":
        """The plan of the `chosen` chunks alone. `chosen`: bool [chunks]."""
        columns = [column[chosen] for column in self._columns]
        columns += [self.token_ids[np.repeat(chosen, self.lengths)], self.pages[:, np.repeat(chosen, self.num_pages)]]
        new_index = (np.cumsum(chosen) - 1).astype(np.int32)
        for pairs in (self.hidden, self.copies, self.adapters):
            left = pairs[chosen[pairs[:, 0]]]
            left[:, 0] = new_index[left[:, 0]]
            columns.append(left)
        return Plan(self.step, *columns)

    def encode(self) -> bytes:
        """The plan as one message frame for the other ranks."""
        lists = (self.token_ids, self.pages, self.hidden, self.copies, self.adapters)
        sizes = np.array([self.step, len(self), len(self.pages), *(some.size for some in lists[:4])], dtype=np.int64)
        parts = (sizes, *self._columns, *lists)
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def decode(cls, frame: bytes) -> "Plan":
        """The plan of a frame that `encode` made. Its arrays are read-only."""
        step, chunks, groups, *sizes = np.frombuffer(frame, dtype=np.int64, count=7).tolist()
        values = np.frombuffer(frame, dtype=np.int32, offset=56)
        columns = values[: NUM_COLUMNS * chunks].reshape(-1, chunks)
        token_ids, pages, hidden, copies, adapters = np.split(values[columns.size :], np.cumsum(sizes))
        lists = [token_ids, pages.reshape(groups, -1), hidden.reshape(-1, 2)]
        lists += [copies.reshape(-1, 7), adapters.reshape(-1, 3)]
        return cls(step, *columns, *lists)

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.slots, self.starts, self.lengths, self.num_logits, self.num_kept_pages, self.num_pages


class SampledTokens(NamedTuple):
    """The result of sampling one step for n sequences. Other fields refer to a sequence by its index i in `token_ids`.

    | field | meaning |
    | --- | --- |
    | `token_ids` | int64 [n], the next tokens |
    | `logprobs` | log probabilities of the next tokens by i, where they were asked for |
    | `failures` | failures by i; each fails one sequence, whose token is not valid |
    | `complete` | every i whose grammar is complete with its last token |
    | `following` | by i, where the sequence's drafts were verified: the tokens after the next one |
    """

    token_ids: np.ndarray
    logprobs: dict[int, list[TokenLogprobs]]
    failures: dict[int, Failure]
    complete: list[int]
    following: dict[int, list[int]] = {}


class PooledChunks(NamedTuple):
    """The hidden states of one step's pooled chunks, each chunk's summed up.

    | field | meaning |
    | --- | --- |
    | `chunks` | the chunks, by index |
    | `sums` | float32 [chunks, hidden_size], over the chunk's last `num_hidden` tokens |
    """

    chunks: list[int]
    sums: np.ndarray


class StepTime(NamedTuple):
    """The time in which a stage computed a step."""

    stage: int
    step: int
    span: Span
