"""A sequence: one request while the replica works on it."""

from typing import TYPE_CHECKING

import numpy as np

from worker.messages import Generate, SamplingParams, TokenLogprobs
from worker.scheduler.sequence_table import SequenceTable, TableColumn

if TYPE_CHECKING:
    from radix.tree import PagedNode
    from worker.structured_output import GrammarState


def pages_for(tokens: int, page_size: int) -> int:
    """Number of pages for `tokens` tokens."""
    return -(-tokens // page_size)


class IntRow:
    """A growable array of int32. The entries are `row.values[:len(row)]`."""

    __slots__ = ("size", "values")

    def __init__(self, values: list[int]) -> None:
        self.values = np.array(values, dtype=np.int32)
        self.size = len(values)

    def __len__(self) -> int:
        return self.size

    def view(self, start: int, end: int) -> np.ndarray:
        """Entries `start` to `end - 1`, int32, as a view: valid until they are overwritten."""
        return self.values[start : min(end, self.size)]

    def agrees(self, other: "IntRow", start: int, end: int) -> bool:
        """Whether both have the same entries from `start` to `end - 1`."""
        return np.array_equal(self.view(start, end), other.view(start, end))

    def extend(self, values: np.ndarray | list[int]) -> None:
        """Appends integers that fit into 32 bits."""
        end = self.size + len(values)
        if end > len(self.values):
            self._grow(end)
        self.values[self.size : end] = values
        self.size = end

    def clear(self) -> None:
        """Removes all entries."""
        self.size = 0

    def _grow(self, needed: int) -> None:
        values = np.empty(max(16, needed, 2 * len(self.values)), dtype=np.int32)
        values[: self.size] = self.values[: self.size]
        self.values = values


class Sequence:
    """The state of one request, owned and changed by the scheduler alone.

    Its counters are in a row of `SequenceTable`, which describes them. It runs while it has a slot (`slot >= 0`). Its
    first `num_shared` pages belong to the tree, kept by a lock on `node`; the other pages are its own.
    """

    num_tokens = TableColumn("tokens")
    num_pending = TableColumn("pending")
    num_computed = TableColumn("computed")
    num_confirmed = TableColumn("confirmed")
    num_pages = TableColumn("pages")
    num_expected = TableColumn("expected")
    num_sent_pages = TableColumn("sent")
    cached_estimate = TableColumn("cached")
    last_token = TableColumn("last_token")
    slot = TableColumn("slots")

    __slots__ = (
        "arrival",
        "arrived_s",
        "cached_tokens",
        "counts",
        "ends_at_limit",
        "estimated_at_step",
        "fresh",
        "grammar",
        "job",
        "node",
        "num_prompt",
        "num_shared",
        "pages",
        "preempted",
        "priority",
        "prompt_logprobs",
        "request_id",
        "row",
        "sampling",
        "started_s",
        "stop_ids",
        "token_limit",
        "tokens_before",
    )

    def __init__(
        self,
        request: Generate,
        counts: "SequenceTable[Sequence]",
        *,
        arrival: int,
        arrived_s: float,
        token_limit: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Takes a row in `counts`.

        - `arrival`: number of the request, in the order of arrival.
        - `arrived_s`: the scheduler's clock at arrival.
        - `token_limit`: prompt + output tokens with which the sequence ends.
        """
        self.request_id = request.request_id
        self.sampling: SamplingParams = request.sampling
        self.priority = request.priority
        self.arrival = arrival
        self.arrived_s = arrived_s
        self.started_s: float | None = None  # when it first ran
        stop_ids = frozenset(self.sampling.stop_token_ids)
        self.stop_ids = stop_ids if self.sampling.ignore_eos else stop_ids | eos_token_ids
        self.ends_at_limit = not self.stop_ids and self.sampling.grammar is None  # nothing else can end it
        self.preempted = False  # whether it ever was: a preempted sequence that waits ran before
        self.job = 0  # see `WaitingQueue`
        self.grammar: GrammarState | None = None

        self.tokens_before = IntRow(request.prompt_ids + request.output_ids)
        self.fresh: list[int] = []  # known tokens after `tokens_before`, which `tokens` appends to it
        self.counts = counts
        self.row = counts.add(self)
        self.num_tokens = self.tokens_before.size
        self.num_prompt = counts.prompt[self.row] = len(request.prompt_ids)
        self.token_limit = counts.limit[self.row] = counts.expected[self.row] = token_limit
        counts.answered_s[self.row] = arrived_s
        self.last_token = int(self.tokens_before.values[-1])

        self.pages = IntRow([])
        self.num_shared = 0
        self.node: PagedNode | None = None
        self.estimated_at_step = -1

        self.cached_tokens = 0  # cached part of the prompt when it first ran
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.sampling.prompt_logprobs is not None and not request.output_ids:
            self.prompt_logprobs = [None]

    @property
    def tokens(self) -> IntRow:
        """All tokens whose value the host knows: prompt, then outputs."""
        if self.fresh:
            self.tokens_before.extend(self.fresh)
            self.fresh.clear()
        return self.tokens_before

    @property
    def num_known(self) -> int:
        return self.num_tokens - self.num_pending

    @property
    def num_missing(self) -> int:
        """Remaining tokens: those whose KV no step computes yet. The last one gives the logits of the next token."""
        return self.num_tokens - self.num_computed

    @property
    def is_running(self) -> bool:
        return self.slot >= 0

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of running sequences, ascending: priority, then arrival. The last sequence is preempted first."""
        return (-self.priority, self.arrival)

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log probabilities of prompt tokens are asked for, and some are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    @property
    def reusable_tokens(self) -> int:
        """How many leading tokens may come from the cache. The last token may not: it gives the logits of the next one.
        Nor may prompt tokens that give log probabilities still to be computed."""
        if self.wants_prompt_logits:
            return len(self.prompt_logprobs or ()) - 1
        return self.num_known - 1

    def pages_missing(self, page_size: int) -> int:
        """Pages that are still to be allocated for the tokens that the sequence has now."""
        return max(0, pages_for(self.num_tokens, page_size) - self.num_pages)

    def output_ids(self) -> list[int]:
        """The known output tokens."""
        return self.tokens.view(self.num_prompt, self.num_known).tolist()

    def add_pages(self, pages: np.ndarray) -> None:
        """Appends pages, integer [n]."""
        self.pages.extend(pages)
        self.num_pages = self.pages.size

    def clear_pages(self) -> None:
        """Removes all pages from the sequence. The pool and the tree are not told."""
        self.pages.clear()
        self.num_pages = self.num_sent_pages = 0
