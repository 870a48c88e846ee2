"""Drafts of a draft model: a smaller model writes the next tokens, greedily."""

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pipeline.shape import BatchShape
from worker.drafts.drafter import Draftable, Drafter, Proposal
from worker.step import PENDING, Plan
from worker.structured_output import GrammarState

log = logging.getLogger(__name__)

BELIEF_FADE = 0.999  # of its cost, with each step in which it did not pay: so it is measured again some time
# Passes, at first, over which the reading of prompts is spread: a prompt is read once for all drafts of its output.
READING_PASSES = 256.0
READING_FADE = 0.998  # of the passes that have been counted, with each proposal
_NO_PAGES = np.empty(0, dtype=np.int32)


class GreedyModel(Protocol):
    """The model, as `worker.executor.draft_model.DraftModel` runs it."""

    page_size: int
    num_pages: int
    vocab_size: int
    token_budget: int
    context_length: int

    def greedy(self, plans: Sequence[Plan]) -> tuple[list[np.ndarray], list[float]]:
        """The likeliest token of each row of logits, by plan, int64 [rows]; and the seconds that each plan took. Tokens
        of a plan may be `PENDING` in the next."""


class PassCosts(Protocol):
    """Costs of a pass of the model, as `worker.engine.cost_store.CostStore` learns it."""

    def seconds(self, shape: BatchShape) -> float:
        """Predicted time of a pass."""

    def observe(self, shape: BatchShape, seconds: Sequence[float]) -> None:
        """Learns from the measured time of a pass, the only one of `seconds`."""


class _DraftText:
    """The state of one sequence."""

    __slots__ = ("computed", "drafts", "hashes", "is_lost", "known", "pages")

    def __init__(self) -> None:
        self.computed = 0  # leading tokens whose draft KV is in the pages
        self.known = 0  # tokens of the sequence at the last proposal
        self.drafts: list[int] = []  # the last proposal, whose draft KV is computed but for the last token's
        self.hashes: list[int] = []  # of the text up to the end of each page that is whole
        self.pages = _NO_PAGES  # the pages that the model's table has
        self.is_lost = False  # whether it has a token that the draft model does not know


class ModelDrafter(Drafter):
    """Lets a draft model write the next tokens of all sequences at once: one forward pass for each token of a proposal.

    - The model's KV lies in the sequences' own pages. A prompt is read with the first proposal, long ones in parts of
      the model's token budget; such a sequence gets no drafts until its text is read.
    - `_hashes` says of each page which text's KV the draft model has written there. A sequence that starts with pages
      of the prefix cache looks there how many of them it may use. The entry is cleared while a page is written, so it
      holds after any change of owner.
    - KV of drafts that were wrong is written again.
    - Its time is predicted from measured passes. The reading of text is spread over the passes of all proposals.
    - An error of the model ends its drafts, and nothing else.
    """

    name = "model"
    is_batched = True

    def __init__(self, model: GreedyModel, costs: PassCosts) -> None:
        """Begins without sequences."""
        self._model, self._costs = model, costs
        self._following: dict[int, _DraftText] = {}
        self._hashes = np.zeros(model.num_pages, dtype=np.int64)  # by page; 0 for no text
        self._step = 0
        # Passes of proposals, and as many as the reading of text would have been in the same time; both fade.
        self._passes, self._reading = READING_PASSES, 0.0
        self._belief = 1.0  # fraction of its cost that is believed
        self._failed = False

    def add(
        self,
        key: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        prediction_ids: Sequence[int],
        grammar: GrammarState | None,
    ) -> None:
        """Begins with a sequence. Nothing is computed yet."""
        self._following[key] = _DraftText()

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Does nothing: `propose_all` reads the sequences."""

    def propose(self, key: int, most: int) -> Proposal:
        """Proposes nothing: see `propose_all`."""
        return Proposal([])

    def remove(self, key: int) -> None:
        """Forgets a sequence. The KV stays in its pages."""
        del self._following[key]

    def seconds(self, single: BatchShape, most: int) -> float:
        """The time of a proposal of `most` tokens for each sequence. `single`: a pass with one token of each."""
        if self._failed:
            return float("inf")
        return most * self._costs.seconds(single) * (1.0 + self._reading / self._passes) * self._belief

    def passed_over(self) -> None:
        """Told when proposals would have cost more than they give."""
        self._belief *= BELIEF_FADE

    def propose_all(self, sequences: Sequence[Draftable], most: Sequence[int]) -> list[Proposal]:
        """The drafts of each sequence, at most `most` of them and as many as its pages have room for. Sequences' last
        tokens are known."""
        lengths = [self._length(seq, limit) for seq, limit in zip(sequences, most, strict=True)]
        plans, ready = self._plans(sequences, lengths)
        if not plans or self._failed:
            return [Proposal([]) for _ in sequences]
        try:
            found, took_s = self._model.greedy(plans)
        except Exception:
            log.exception("the draft model failed: it proposes nothing any more")
            self._failed = True
            return [Proposal([]) for _ in sequences]
        self._measured(plans, took_s)
        drafts: dict[int, list[int]] = {i: [] for i in ready}
        for number, likeliest in enumerate(found):
            for i, token_id in zip([i for i in ready if lengths[i] > number], likeliest.tolist(), strict=True):
                drafts[i].append(token_id)
        for i, token_ids in drafts.items():
            self._following[sequences[i].slot].drafts = token_ids
        return [Proposal(self._within(drafts.get(i, []))) for i in range(len(sequences))]

    def _within(self, token_ids: list[int]) -> list[int]:
        """The tokens before the first that only the draft model has."""
        size = self._model.vocab_size
        return token_ids[: next((i for i, token_id in enumerate(token_ids) if token_id >= size), len(token_ids))]

    def _measured(self, plans: Sequence[Plan], took_s: Sequence[float]) -> None:
        """Learns from a proposal what its passes cost: the first, which reads, and the mean of those after it."""
        self._belief = 1.0
        first, *others = plans
        shape = _shape(first)
        single = BatchShape.decoding(len(first), int((first.starts + first.lengths).sum()))
        reading = self._costs.seconds(shape) - (single_s := self._costs.seconds(single))
        self._reading = READING_FADE * self._reading + (max(0.0, reading / single_s) if single_s > 0.0 else 0.0)
        self._passes = READING_FADE * self._passes + len(plans)
        self._costs.observe(shape, took_s[:1])
        if others:
            middle = others[len(others) // 2]
            self._costs.observe(_shape(middle), [sum(took_s[1:]) / len(others)])

    def _length(self, seq: Draftable, most: int) -> int:
        """Drafts for a sequence: the draft model computes all but the last of them."""
        room = min(self._model.context_length, seq.num_pages * self._model.page_size) - seq.num_known
        return min(most, room + 1)

    def _plans(self, sequences: Sequence[Draftable], lengths: Sequence[int]) -> tuple[list[Plan], list[int]]:
        """The passes, and the sequences that get drafts, by index: those whose known tokens the first pass completes.
        Each further pass computes one draft of each sequence that wants more."""
        room, chosen, columns = self._model.token_budget, list[int](), list[tuple[int, int, int, int]]()
        token_ids, pages = list[np.ndarray](), list[np.ndarray]()
        ready = []
        for i, (seq, length) in enumerate(zip(sequences, lengths, strict=True)):
            if length <= 0 or room <= 0:
                continue
            following, known = self._following[seq.slot], seq.num_known
            kept, new = self._catch_up(following, seq)
            start = following.computed
            end = min(known, start + room)
            text = seq.token_ids(start, end)
            if following.is_lost or int(text.max()) >= self._model.vocab_size:
                following.is_lost = True
                continue
            room -= end - start
            self._begin_writing(following, known + length - 1 if end == known else end)
            following.computed, following.known, following.drafts = end, known, []
            chosen.append(i)
            columns.append((start, end - start, end == known, kept))
            token_ids.append(text)
            pages.append(new)
            if end == known:
                ready.append(i)
        if not chosen:
            return [], []
        slots = np.array([seq.slot for seq in sequences], dtype=np.int32)
        starts, counts, num_logits, kept_pages = np.array(columns, dtype=np.int32).T.copy()
        num_pages = np.array([len(some) for some in pages], dtype=np.int32)
        columns_of = (slots[chosen], starts, counts, num_logits, kept_pages, num_pages)
        plans = [Plan(self._next_step(), *columns_of, np.concatenate(token_ids), np.concatenate(pages)[None])]
        known_of = np.array([seq.num_known for seq in sequences], dtype=np.int32)
        for number in range(1, max((lengths[i] for i in ready), default=0)):
            some = [i for i in ready if lengths[i] > number]
            ones, none = np.ones(len(some), dtype=np.int32), np.zeros(len(some), dtype=np.int32)
            places = known_of[some] + np.int32(number - 1)
            pending = np.full(len(some), PENDING, dtype=np.int32)
            plans.append(Plan(self._next_step(), slots[some], places, ones, ones, none, none, pending, _NO_PAGES[None]))
        return plans, ready

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    # ---------------------------------------------------------------- whose KV is where

    def _catch_up(self, following: _DraftText, seq: Draftable) -> tuple[int, np.ndarray]:
        """Counts what is computed of a sequence as it is now: drafts that were right, and pages that others have
        computed. Returns the change of the model's page table: how many pages it keeps, and those that follow."""
        if following.drafts:
            text = seq.token_ids(following.known, following.known + len(following.drafts) - 1).tolist()
            right = (own == other for own, other in zip(following.drafts, text, strict=False))
            following.computed += next((i for i, same in enumerate(right) if not same), len(text))
        most_pages = -(-self._model.context_length // self._model.page_size)
        pages = seq.pages(0, min(seq.num_pages, most_pages)).copy()
        both = min(len(pages), len(following.pages))
        differ = np.flatnonzero(pages[:both] != following.pages[:both])
        kept = int(differ[0]) if len(differ) else both
        is_new = not len(following.pages)
        following.pages = pages
        page_size = self._model.page_size
        self._mark_whole(following, seq, kept)
        if is_new or kept * page_size < following.computed:
            following.computed = min(following.computed, kept * page_size)
            del following.hashes[kept:]
            self._find_computed(following, seq)
        following.computed = min(following.computed, seq.num_known - 1)  # the last one gives the logits
        return kept, pages[kept:]

    def _mark_whole(self, following: _DraftText, seq: Draftable, kept: int) -> None:
        """Says of the pages that are whole now, of the first `kept`, which text's KV they hold."""
        for index in range(len(following.hashes), min(kept, following.computed // self._model.page_size)):
            following.hashes.append(self._hash(following, seq, index))
            self._hashes[following.pages[index]] = following.hashes[index]

    def _find_computed(self, following: _DraftText, seq: Draftable) -> None:
        """Counts the following pages that hold the KV of the sequence's text, computed by any sequence."""
        for index in range(len(following.hashes), min(len(following.pages), seq.num_known // self._model.page_size)):
            value = self._hash(following, seq, index)
            if self._hashes[following.pages[index]] != value:
                break
            following.hashes.append(value)
            following.computed = (index + 1) * self._model.page_size

    def _hash(self, following: _DraftText, seq: Draftable, index: int) -> int:
        """A number for the text up to the end of page number `index`, given that of the page before; not 0."""
        before = following.hashes[index - 1] if index else 0
        page_size = self._model.page_size
        return hash((before, seq.token_ids(index * page_size, (index + 1) * page_size).tobytes())) or 1

    def _begin_writing(self, following: _DraftText, end: int) -> None:
        """Clears what is said of the pages from the first position that is not computed up to `end - 1`."""
        page_size = self._model.page_size
        first = following.computed // page_size
        del following.hashes[first:]
        self._hashes[following.pages[first : -(-end // page_size)]] = 0


def _shape(plan: Plan) -> BatchShape:
    return BatchShape(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))
