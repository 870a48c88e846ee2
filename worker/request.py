"""A sequence: one request while the replica works on it."""

from typing import TYPE_CHECKING

import numpy as np

from worker.counts import Count, Counts
from worker.messages import Generate, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from radix.tree import PagedNode
    from worker.grammar import GrammarState


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens take."""
    return -(-tokens // page_size)


class IntRow:
    """A growing row of int32. `row.values[:len(row)]` is what it holds."""

    __slots__ = ("size", "values")

    def __init__(self, values: list[int]) -> None:
        self.values = np.array(values, dtype=np.int32)
        self.size = len(values)

    def __len__(self) -> int:
        return self.size

    def view(self, start: int, end: int) -> np.ndarray:
        """Entries start .. end-1, int32, without a copy: good until they are overwritten."""
        return self.values[start : min(end, self.size)]

    def agrees(self, other: "IntRow", start: int, end: int) -> bool:
        """Whether both hold the same from `start` to `end`."""
        return np.array_equal(self.view(start, end), other.view(start, end))

    def extend(self, values: np.ndarray | list[int]) -> None:
        """Puts integers of 32 bits behind the others."""
        end = self.size + len(values)
        if end > len(self.values):
            self._grow(end)
        self.values[self.size : end] = values
        self.size = end

    def clear(self) -> None:
        """Forgets all entries."""
        self.size = 0

    def _grow(self, needed: int) -> None:
        values = np.empty(max(16, needed, 2 * len(self.values)), dtype=np.int32)
        values[: self.size] = self.values[: self.size]
        self.values = values


class Sequence:
    """The state of one request, owned and changed by the scheduler alone. What is counted of it lies in a row of
    `Counts`, which says what the counts are.

    The first `num_shared` pages are the tree's, kept by a lock on `node`; the rest are its own. It is running while it
    has a `slot` (>= 0).
    """

    num_tokens = Count("tokens")
    num_pending = Count("pending")
    num_computed = Count("computed")
    num_confirmed = Count("confirmed")
    num_pages = Count("pages")
    num_expected = Count("expected")
    num_sent_pages = Count("sent")
    cached_estimate = Count("cached")
    last_token = Count("last_token")
    slot = Count("slots")

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
        counts: Counts,
        *,
        arrival: int,
        arrived_s: float,
        token_limit: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """`arrival` numbers requests in the order they came, `arrived_s` is the scheduler's clock then. It ends when
        it has `token_limit` tokens, prompt and output together."""
        self.request_id = request.request_id
        self.sampling: SamplingParams = request.sampling
        self.priority = request.priority
        self.arrival = arrival
        self.arrived_s = arrived_s
        self.started_s: float | None = None  # when it first ran
        stop_ids = frozenset(self.sampling.stop_token_ids)
        self.stop_ids = stop_ids if self.sampling.ignore_eos else stop_ids | eos_token_ids
        self.ends_at_limit = not self.stop_ids and self.sampling.grammar is None  # and never before
        self.preempted = False  # ever: it ran before, if it waits
        self.job = 0  # see `WaitingQueue`
        self.grammar: GrammarState | None = None

        self.tokens_before = IntRow(request.prompt_ids + request.output_ids)
        self.fresh: list[int] = []  # the known tokens after those
        self.counts = counts
        self.row = counts.open(self)
        self.num_tokens = self.tokens_before.size
        self.num_prompt = counts.prompt[self.row] = len(request.prompt_ids)
        self.token_limit = counts.limit[self.row] = counts.expected[self.row] = token_limit
        counts.answered_s[self.row] = arrived_s
        self.last_token = int(self.tokens_before.values[-1])

        self.pages = IntRow([])
        self.num_shared = 0
        self.node: PagedNode | None = None
        self.estimated_at_step = -1

        self.cached_tokens = 0  # of the prompt, when it first ran
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.sampling.prompt_logprobs is not None and not request.output_ids:
            self.prompt_logprobs = [None]

    @property
    def tokens(self) -> IntRow:
        """Those that are known."""
        if self.fresh:
            self.tokens_before.extend(self.fresh)
            self.fresh.clear()
        return self.tokens_before

    @property
    def num_known(self) -> int:
        return self.num_tokens - self.num_pending

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is yet to be computed. The last of them gives the logits of the next token."""
        return self.num_tokens - self.num_computed

    @property
    def is_running(self) -> bool:
        return self.slot >= 0

    @property
    def rank(self) -> tuple[int, int]:
        """Ascending from the one that runs first: by priority, then by arrival. The last gives way for pages."""
        return (-self.priority, self.arrival)

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log probabilities of the prompt's tokens are asked for and not all there."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    @property
    def reusable_tokens(self) -> int:
        """How many tokens may come from the cache: not the last, which gives the next token, and none whose logits are
        still to be seen."""
        if self.wants_prompt_logits:
            return len(self.prompt_logprobs or ()) - 1
        return self.num_known - 1

    def pages_missing(self, page_size: int) -> int:
        """Pages that it has yet to get for the tokens it has now."""
        return max(0, pages_for(self.num_tokens, page_size) - self.num_pages)

    def output_ids(self) -> list[int]:
        """Those known after the prompt."""
        return self.tokens.view(self.num_prompt, self.num_known).tolist()

    def add_pages(self, pages: np.ndarray) -> None:
        """It holds these behind the others: integers `[n]`."""
        self.pages.extend(pages)
        self.num_pages = self.pages.size

    def clear_pages(self) -> None:
        """It holds none. Nobody is told here."""
        self.pages.clear()
        self.num_pages = self.num_sent_pages = 0
