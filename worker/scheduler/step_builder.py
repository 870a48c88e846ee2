"""A step while it is built: its sequences and the sizes of their chunks, within its budget."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pipeline.budget import Budget
from worker.scheduler.fair_share import FairShare
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.scheduled_step import ScheduledStep
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable
from worker.step import HIDDEN_ROWS, PENDING, PROMPT_LOGIT_ROWS, Plan

MAX_COMPARED_SEQUENCES = 4  # sequences that compute a prompt, with each of which a waiting one is compared whole
_NO_ROWS = np.empty(0, dtype=np.int64)


class _Others(NamedTuple):
    """The results of a step's chunks, by index of the chunk.

    | field | meaning |
    | --- | --- |
    | `sampled` | number of tokens that the sequence may get, int32 |
    | `samples`, `drafts`, `prompted` | as in `ScheduledStep` |
    | `num_logits` | as in `Plan` |
    | `hidden` | `Plan.hidden`, None without pooled prompts |
    """

    sampled: np.ndarray
    samples: np.ndarray
    num_logits: np.ndarray
    drafts: dict[int, list[int]]
    prompted: list[int]
    hidden: np.ndarray | None = None


class StepBuilder:
    """Collects the sequences of a step and the sizes of their chunks. Sequences are not changed before `build`."""

    def __init__(
        self,
        budget: Budget,
        kv_cache: KVCacheManager,
        table: SequenceTable[Sequence],
        shares: FairShare | None = None,
    ) -> None:
        """`shares`: says how long prompts of clients that are not quiet may make the step; None: as `budget` does."""
        self.budget = budget
        self._shares = shares
        self._most_prompt_tokens = None if shares is None else shares.most_prompt_tokens(budget.least_chunk)
        self._kv_cache = kv_cache
        self._page_size = kv_cache.page_size
        self._table = table
        self.has_preempted = False  # whether a sequence was preempted while the step is built
        self._prompt_rows_left = PROMPT_LOGIT_ROWS
        self._hidden_rows_left = HIDDEN_ROWS
        self._decodes = _NO_ROWS
        self._sizes: dict[Sequence, int] = {}
        self._drafts: dict[Sequence, list[int]] = {}
        # Sequences whose prompts are being computed, by their next page: its first position, then its tokens as bytes.
        self._prefilling: dict[int, dict[bytes, list[Sequence]]] = {}
        # Where resume points are planned: the same sequences by their first page.
        self._by_first_page: dict[bytes, list[Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._sizes) or len(self._decodes) > 0

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sizes

    def limit(self, seq: Sequence) -> int:
        """The longest chunk that `seq` may have in this step, in tokens."""
        size = self._chunk(seq, seq.num_computed, seq.num_missing)
        if seq.wants_prompt_logits:
            size = min(size, max(0, seq.reusable_tokens - seq.num_computed) + self._prompt_rows_left)
        if seq.pool is not None and seq.pool.takes_all:
            size = min(size, self._hidden_rows_left)
        return size

    def may_start(self, seq: Sequence) -> bool:
        """Whether a waiting sequence could have a first chunk in this step."""
        cached = seq.cached_estimate
        return self._chunk(seq, cached, seq.num_tokens - cached) > 0

    def add_decodes(self, rows: np.ndarray) -> None:
        """Adds a decode for each sequence of `rows`, int64, all past their prompts. The caller has counted these in the
        budget."""
        self._decodes = rows

    def add(self, seq: Sequence, size: int) -> None:
        """Adds the next `size` tokens of `seq`, which has pages for them."""
        self._sizes[seq] = size
        self.budget.add(seq.num_computed, size)
        self._count_rows(seq, size, taken=1)

    @property
    def decodes(self) -> np.ndarray:
        """Table rows of the sequences with a decode, int64."""
        return self._decodes

    @property
    def draft_room(self) -> int:
        """Number of drafts that the step can still take."""
        return max(0, min(self.budget.tokens_left, self._prompt_rows_left))

    def add_drafts(self, drafts: Mapping[Sequence, list[int]]) -> None:
        """Adds drafts to the decodes of sequences, which are in the step and have pages for them."""
        rows = np.array([seq.row for seq in drafts], dtype=np.int64)
        for (seq, token_ids), start in zip(drafts.items(), self._table.num_computed[rows].tolist(), strict=True):
            self._sizes[seq] = 1 + len(token_ids)
            self.budget.remove(start, 1)
            self.budget.add(start, 1 + len(token_ids))
            self._prompt_rows_left -= len(token_ids)
        self._drafts.update(drafts)
        drafted = set(rows.tolist())  # `np.isin` takes longer for any number of decodes
        self._decodes = np.array([row for row in self._decodes.tolist() if row not in drafted], dtype=np.int64)

    def watch(self, seq: Sequence) -> None:
        """Lets other sequences wait for the prefix of `seq`. This step or one in flight computes a part of its
        prompt."""
        if (found := self._next_page(seq)) is not None:
            start, page = found
            self._prefilling.setdefault(start, {}).setdefault(page, []).append(seq)
        if self._kv_cache.plans_points:
            self._by_first_page.setdefault(self._first_page(seq), []).append(seq)

    def preempt(self, seq: Sequence) -> None:
        """Removes a sequence that is preempted, if it is in the step."""
        self.has_preempted = True
        others = self._decodes[self._decodes != seq.row]
        chunk, drafts = self._sizes.pop(seq, 0), self._drafts.pop(seq, None)
        if drafts is not None:
            self._prompt_rows_left += len(drafts)
        else:
            self._count_rows(seq, chunk, taken=-1)
        size = chunk + len(self._decodes) - len(others)
        if size:
            self.budget.remove(seq.num_computed, size)
        self._decodes = others
        if (found := self._next_page(seq)) is not None:
            start, page = found
            prefilling = self._prefilling.get(start, {}).get(page, [])
            if seq in prefilling:
                prefilling.remove(seq)
        if seq in (alike := self._by_first_page.get(self._first_page(seq), [])):
            alike.remove(seq)

    def computes_prefix_of(self, seq: Sequence) -> bool:
        """Whether a sequence in this step, or in one in flight, computes the page that the waiting `seq` would compute
        first. The tree has this page when that step has ended, so waiting costs less than computing it twice.

        Where resume points are planned, the tree has it up to the next of them. A sequence that computes much that
        `seq` needs too gets one where they part."""
        cached, reusable = seq.cached_estimate, seq.reusable_tokens
        for start, prefilling in self._prefilling.items():
            end = start + self._page_size
            if cached <= start and end <= reusable:
                alike = prefilling.get(seq.token_ids(start, end).tobytes(), ())
                computing = next((other for other in alike if seq.shares_prefix(other, start)), None)
                if computing is not None:
                    self._kv_cache.continue_where_parts(computing, seq)
                    return True
        if not self._by_first_page:
            return False
        begun_alike = self._by_first_page.get(self._first_page(seq), [])
        return any(self._kv_cache.saves_where_parts(other, seq) for other in begun_alike[:MAX_COMPARED_SEQUENCES])

    def build(self, number: int, after: int | None = None) -> ScheduledStep:
        """Builds step `number`. Its tokens count as computed from now on. A sequence without remaining tokens gets one
        more pending token. `after`: with pipeline parallelism, the step in flight that samples the tokens that are
        pending now."""
        table, rows = self._table, self._decodes
        if self._sizes:
            rows = np.concatenate((rows, np.array([seq.row for seq in self._sizes], dtype=np.int64)))
        starts, tokens, pending = table.num_computed[rows], table.num_tokens[rows], table.num_pending[rows]
        num_pending = np.count_nonzero(pending)
        token_ids = table.last_token[rows]
        if num_pending:
            token_ids[pending > 0] = PENDING
        # Most steps have decodes alone: chunks of one token that give the next one.
        sampled = num_logits = lengths = np.ones(len(rows), dtype=np.int32)
        samples = lengths > 0
        drafts, prompted, hidden = dict[int, list[int]](), list[int](), None
        if self._sizes:
            lengths[len(self._decodes) :] = list(self._sizes.values())
            others = self._others(starts, lengths, tokens)
            sampled, samples, num_logits, drafts, prompted, hidden = others
            token_ids = np.concatenate((token_ids[: len(self._decodes)], *self._token_ids(list(self._sizes))))
        num_kept, num_pages, pages = self._kv_cache.table_changes(rows)
        sequences = table.sequences_at(rows)
        table.num_computed[rows] = starts + lengths
        # With drafts: as many as there will be at most. `OutputQueue` corrects this.
        table.num_tokens[rows] = tokens + sampled
        table.num_pending[rows] = pending + sampled
        plan = Plan(number, table.slot[rows], starts, lengths, num_logits, num_kept, num_pages, token_ids, pages)
        if hidden is not None:
            plan.hidden = hidden
        plan.copies = self._kv_cache.plan_copies(sequences, starts, lengths, len(self._decodes))
        if np.count_nonzero(own := table.adapter[rows]):
            adapted = own.nonzero()[0].astype(np.int32)
            plan.adapters = np.stack((adapted, table.adapter_slot[rows[adapted]], own[adapted]), axis=1)
        dropped = np.zeros(len(rows), dtype=bool)
        after = after if num_pending else None
        return ScheduledStep(plan, rows, sequences, samples, dropped, prompted, self.budget.shape, after, drafts)

    def _others(self, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> _Others:
        """The results of a step that has more than decodes, which come first. Arguments are int32 [chunks]: each
        chunk's start and length, and the tokens of its sequence."""
        ends = starts + lengths
        sampled = (ends == tokens).astype(np.int32)
        others = list(enumerate(self._sizes, len(self._decodes)))
        drafts = {i: self._drafts[seq] for i, seq in others if seq in self._drafts}
        for i in drafts:
            sampled[i] = lengths[i]
        samples = sampled > 0
        num_logits = sampled.copy()
        prompted, hidden = [], []
        for i, seq in others:
            if seq.wants_prompt_logits:
                num_logits[i] = max(samples[i], ends[i] - max(starts[i], seq.reusable_tokens))
                if num_logits[i]:
                    prompted.append(i)
            if seq.pool is not None:
                num_logits[i] = 0
                hidden.append((i, seq.pool.num_hidden(int(starts[i]), int(ends[i]))))
        if not hidden:
            return _Others(sampled, samples, num_logits, drafts, prompted)
        pairs = np.array([pair for pair in hidden if pair[1]], dtype=np.int32).reshape(-1, 2)
        # What is counted as the next token is the embedding.
        return _Others(sampled, samples & (num_logits > 0), num_logits, drafts, prompted, pairs)

    def _count_rows(self, seq: Sequence, size: int, taken: int) -> None:
        """Counts the rows of logits for the prompt, and of hidden states, of a chunk that the step takes (`taken` 1) or
        gives back (-1)."""
        if seq.wants_prompt_logits:
            end = seq.num_computed + size
            self._prompt_rows_left -= taken * max(0, end - max(seq.num_computed, seq.reusable_tokens))
        if seq.pool is not None and seq.pool.takes_all:
            self._hidden_rows_left -= taken * size

    def _next_page(self, seq: Sequence) -> tuple[int, bytes] | None:
        """The page with which the tree is to get the next tokens of `seq`: its first position, and its known tokens as
        int32 bytes. None if there is none."""
        start = self._kv_cache.next_page(seq)
        return None if start is None else (start, seq.token_ids(start, start + self._page_size).tobytes())

    def _first_page(self, seq: Sequence) -> bytes:
        """The first page of tokens, as int32 bytes."""
        return seq.token_ids(0, self._page_size).tobytes()

    def _chunk(self, seq: Sequence, start: int, missing: int) -> int:
        room, most, shares = missing, self._most_prompt_tokens, self._shares
        if most is not None and shares is not None and missing > 1 and not shares.is_quiet(seq.share.tenant):
            room = min(missing, most - (self.budget.shape.tokens - self.budget.shape.decodes))
        return self.budget.chunk(start, missing, room)

    def _token_ids(self, sequences: list[Sequence]) -> list[np.ndarray]:
        """Token ids of each sequence's chunk, int32; `PENDING` if the host does not know the token yet."""
        chunks = []
        for seq in sequences:
            start = seq.num_computed
            known = seq.token_ids(start, start + self._sizes[seq])
            known = known if len(known) else np.array([PENDING], dtype=np.int32)
            if seq in self._drafts:
                known = np.concatenate((known, np.array(self._drafts[seq], dtype=np.int32)))
            chunks.append(known)
        return chunks
