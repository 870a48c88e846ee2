"""One step's plan: what the scheduler tells every rank to compute. Every rank that applies the same plans in the same
order holds the same page tables; nothing else passes from the scheduler to the ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# The token of a chunk that the step before samples: no host knows it yet, `last_tokens[slot]` on the device has it.
PENDING = -1


class Chunk(NamedTuple):
    """The part of one sequence that a step computes: positions `start` to `start + len(token_ids)`.

    `slot` is the sequence's row in the ranks' page tables and in the sampler, its own from admission until it finishes
    or is preempted. Before the step runs, the row's table becomes its first `num_kept` pages with `pages` after them.
    A chunk whose `token_ids` are `[PENDING]` takes its token from the device.
    Token i of a sequence lives in page `table[i // page_size]` at offset `i % page_size`. The last `num_logits` tokens
    of the chunk give a row of logits each: none in the middle of a prompt, one where the next token is sampled, more
    where log probabilities of the prompt are asked for.
    """

    slot: int
    start: int
    token_ids: list[int]
    num_kept: int
    pages: list[int]
    num_logits: int


@dataclass(slots=True, eq=False)
class Plan:
    """One step: chunks of different sequences, in the order in which their logits come back.

    In columns, since most steps have hundreds of chunks of one token: int32 `[chunks]`, and the chunks' tokens and
    pages one after the other.
    """

    step: int
    slots: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    num_logits: np.ndarray
    num_kept: np.ndarray
    num_pages: np.ndarray
    token_ids: np.ndarray
    pages: np.ndarray

    @classmethod
    def of(cls, step: int, chunks: Iterable[Chunk]) -> "Plan":
        """The plan of these chunks."""
        slots, starts, token_ids, num_kept, pages, num_logits = zip(*chunks, strict=True)
        lengths, num_pages = [len(ids) for ids in token_ids], [len(some) for some in pages]
        flat = [[i for some in column for i in some] for column in (token_ids, pages)]
        columns = (slots, starts, lengths, num_logits, num_kept, num_pages, *flat)
        return cls(step, *(np.array(column, dtype=np.int32) for column in columns))

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def waits(self) -> bool:
        """Whether a token is pending."""
        return bool((self.token_ids == PENDING).any())

    @property
    def chunks(self) -> list[Chunk]:
        """Row by row, for whoever has the time."""
        token_ids = np.split(self.token_ids, np.cumsum(self.lengths)[:-1])
        pages = np.split(self.pages, np.cumsum(self.num_pages)[:-1])
        columns = (self.slots.tolist(), self.starts.tolist(), token_ids, self.num_kept.tolist(), pages)
        return [
            Chunk(slot, start, ids.tolist(), kept, some.tolist(), num)
            for slot, start, ids, kept, some, num in zip(*columns, self.num_logits.tolist(), strict=True)
        ]

    def only(self, chosen: np.ndarray) -> "Plan":
        """The same without the chunks that are not `chosen`, bool `[chunks]`."""
        columns = [column[chosen] for column in self._columns]
        columns += [self.token_ids[np.repeat(chosen, self.lengths)], self.pages[np.repeat(chosen, self.num_pages)]]
        return Plan(self.step, *columns)

    def encode(self) -> bytes:
        """One frame for the other ranks."""
        sizes = np.array([self.step, len(self), len(self.token_ids), len(self.pages)], dtype=np.int64)
        return b"".join(part.tobytes() for part in (sizes, *self._columns, self.token_ids, self.pages))

    @classmethod
    def decode(cls, frame: bytes) -> "Plan":
        """What `encode` made of a plan. Nothing can be written into its arrays."""
        step, chunks, tokens, pages = np.frombuffer(frame, dtype=np.int64, count=4).tolist()
        values = np.frombuffer(frame, dtype=np.int32, offset=32)
        columns = values[: len(values) - tokens - pages].reshape(-1, chunks)
        return cls(step, *columns, *np.split(values[columns.size :], [tokens]))

    @property
    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.slots, self.starts, self.lengths, self.num_logits, self.num_kept, self.num_pages
