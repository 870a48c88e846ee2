"""One step in the making: which sequences are in it, with how many tokens each, within its budget."""

from dataclasses import dataclass

import numpy as np

from pipeline.budget import Budget
from pipeline.shape import BatchShape
from worker.counts import Counts
from worker.plan import PENDING, Plan
from worker.request import Sequence

# Most in a step: where log probabilities of prompts are wanted, every token gives a row, of vocabulary x 4 bytes.
PROMPT_LOGIT_ROWS = 256

_NOBODY = np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Step:
    """A plan, from its making to its update, and who is in it: of each chunk the sequence and its row in the counts,
    whether it gets a token, and whether it has gone since. Those in `prompted` get logits of their prompt's tokens.
    `shape` is what the policy and the cost models see of it. Of a pipeline, `after` is the step before whose tokens it
    takes from the device, if it does."""

    plan: Plan
    rows: np.ndarray
    sequences: list[Sequence]
    gives: np.ndarray
    gone: np.ndarray
    prompted: list[int]
    shape: BatchShape
    after: int | None = None

    @property
    def sequences_left(self) -> list[Sequence]:
        """Those that have not gone."""
        return [seq for seq, gone in zip(self.sequences, self.gone.tolist(), strict=True) if not gone]

    def leave(self, row: int) -> None:
        """The sequence of this row has ended: whatever the step gives it is dropped."""
        self.gone[self.rows == row] = True

    def withdraw(self) -> None:
        """Takes out of the plan, before it runs, whoever has gone since it was made."""
        stay = ~self.gone
        for start, length in zip(self.plan.starts[self.gone], self.plan.lengths[self.gone], strict=True):
            self.shape.remove(int(start), int(length))
        places = np.cumsum(stay) - 1
        self.plan = self.plan.only(stay)
        self.prompted = [int(places[i]) for i in self.prompted if stay[i]]
        self.sequences = self.sequences_left
        self.rows, self.gives, self.gone = self.rows[stay], self.gives[stay], self.gone[stay]


class Batch:
    """Sequences and the sizes of their chunks. They are unchanged until `step`."""

    def __init__(self, budget: Budget, page_size: int, counts: Counts) -> None:
        self.budget = budget
        self._page_size = page_size
        self._counts = counts
        self._prompt_rows_left = PROMPT_LOGIT_ROWS
        self._decodes = _NOBODY
        self._sizes: dict[Sequence, int] = {}
        # Those whose prompts are being computed, by the page that comes next of each: where it begins, and its tokens.
        self._prefilling: dict[int, dict[bytes, list[Sequence]]] = {}

    def __bool__(self) -> bool:
        return bool(self._sizes) or len(self._decodes) > 0

    def limit(self, seq: Sequence) -> int:
        """Tokens that `seq` may have of this step."""
        size = self._chunk(seq.num_computed, seq.num_missing)
        return min(size, self._prompt_rows_left) if seq.wants_prompt_logits else size

    def may_start(self, seq: Sequence) -> bool:
        """Whether this step has a first chunk for a sequence that waits."""
        cached = seq.cached_estimate
        return self._chunk(cached, seq.num_tokens - cached) > 0

    def add_decodes(self, rows: np.ndarray) -> None:
        """`add` of one token to each sequence of these rows, int64, all of them past their prompts. The budget has
        them already."""
        self._decodes = rows

    def add(self, seq: Sequence, size: int) -> None:
        """The next `size` of the tokens that `seq` lacks are in this step. It has the pages for them."""
        self._sizes[seq] = size
        self.budget.add(seq.num_computed, size)
        if seq.wants_prompt_logits:
            self._prompt_rows_left -= size

    def watch(self, seq: Sequence) -> None:
        """Counts `seq`, of which this step or the one in flight computes a part of the prompt, among those whose prefix
        others may wait for."""
        start, page = self._next_page(seq)
        self._prefilling.setdefault(start, {}).setdefault(page, []).append(seq)

    def discard(self, seq: Sequence) -> None:
        """Takes a sequence out again, if it is in."""
        others = self._decodes[self._decodes != seq.row]
        size = self._sizes.pop(seq, 0) + len(self._decodes) - len(others)
        if size:
            self.budget.remove(seq.num_computed, size)
        self._decodes = others
        start, page = self._next_page(seq)
        prefilling = self._prefilling.get(start, {}).get(page, [])
        if seq in prefilling:
            prefilling.remove(seq)

    def computes_prefix_of(self, seq: Sequence) -> bool:
        """Whether a sequence in this step, or in the one in flight, computes the page that the waiting `seq` would
        compute first. The tree has it once that step has ended, so that waiting costs less than computing it twice."""
        tokens, cached, reusable = seq.tokens, seq.cached_estimate, seq.reusable_tokens
        for start, prefilling in self._prefilling.items():
            end = start + self._page_size
            if cached <= start and end <= reusable:
                alike = prefilling.get(tokens.view(start, end).tobytes(), ())
                if any(tokens.agrees(other.tokens, 0, start) for other in alike):
                    return True
        return False

    def step(self, number: int, after: int | None = None) -> Step:
        """The step as it is going to run. From now on the sequences count as computed so far, and those of which
        nothing is missing then have one more token pending. `after`: the step whose tokens are those that are pending
        now, of a pipeline."""
        counts, others = self._counts, list(self._sizes)
        rows = self._decodes
        if others:
            rows = np.concatenate((rows, np.array([seq.row for seq in others], dtype=np.int64)))
        lengths = np.ones(len(rows), dtype=np.int32)
        lengths[len(self._decodes) :] = list(self._sizes.values())
        starts, tokens, pending = counts.computed[rows], counts.tokens[rows], counts.pending[rows]
        ends = starts + lengths
        gives = ends == tokens
        num_logits = gives.astype(np.int32)
        prompted = []
        for i, seq in enumerate(others, len(self._decodes)):
            if seq.wants_prompt_logits:
                num_logits[i] = ends[i] - max(starts[i], seq.reusable_tokens)
                prompted.append(i)
        token_ids = np.where(pending > 0, PENDING, counts.last_token[rows])
        if others:
            token_ids = np.concatenate((token_ids[: len(self._decodes)], *self._token_ids(others)))
        num_kept, num_pages, pages = self._pages(rows)
        counts.computed[rows] = ends
        counts.tokens[rows] = tokens + gives
        counts.pending[rows] = pending + gives
        plan = Plan(number, counts.slots[rows], starts, lengths, num_logits, num_kept, num_pages, token_ids, pages)
        gone = np.zeros(len(rows), dtype=bool)
        after = after if np.count_nonzero(pending) else None
        return Step(plan, rows, counts.of(rows), gives, gone, prompted, self.budget.shape, after)

    def _next_page(self, seq: Sequence) -> tuple[int, bytes]:
        """Where the first page begins that ended steps have not computed to its end, and its tokens, int32."""
        start = seq.num_confirmed // self._page_size * self._page_size
        return start, seq.tokens.view(start, start + self._page_size).tobytes()

    def _chunk(self, start: int, missing: int) -> int:
        return self.budget.chunk(start, missing, missing)

    def _token_ids(self, sequences: list[Sequence]) -> list[np.ndarray]:
        """Those of their chunks."""
        chunks = []
        for seq in sequences:
            start = seq.num_computed
            known = seq.tokens.view(start, start + self._sizes[seq])
            chunks.append(known if len(known) else np.array([PENDING], dtype=np.int32))
        return chunks

    def _pages(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the ranks do not know yet of the tables: how many pages of each they keep, how many come after those,
        and these, one sequence after the other."""
        counts = self._counts
        kept, held = counts.sent[rows], counts.pages[rows]
        changed = np.flatnonzero(kept != held)
        if not len(changed):
            return kept, kept - held, np.empty(0, dtype=np.int32)
        edges = zip(counts.of(rows[changed]), kept[changed].tolist(), held[changed].tolist(), strict=True)
        pages = np.concatenate([seq.pages.view(first, last) for seq, first, last in edges])
        counts.sent[rows] = held
        return kept, held - kept, pages
