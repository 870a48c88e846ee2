"""A sequence: one request while the replica works on it."""

from typing import TYPE_CHECKING

import numpy as np

from worker.messages import Failure, Generate, Output, SamplingParams, TokenLogprobs

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

    def append(self, value: int) -> None:
        if self.size == len(self.values):
            self._grow(self.size + 1)
        self.values[self.size] = value
        self.size += 1

    def extend(self, values: np.ndarray) -> None:
        end = self.size + len(values)
        if end > len(self.values):
            self._grow(end)
        self.values[self.size : end] = values
        self.size = end

    def clear(self) -> None:
        self.size = 0

    def _grow(self, needed: int) -> None:
        values = np.empty(max(16, needed, 2 * len(self.values)), dtype=np.int32)
        values[: self.size] = self.values[: self.size]
        self.values = values


class Sequence:
    """The state of one request, owned and changed by the scheduler alone.

    Its tokens are the prompt's, then the outputs', then `num_pending` that steps in flight sample: those exist, and
    their values are not known yet. `num_computed` tokens have their KV in `pages`, by steps in flight too; whatever is
    missing is computed in chunks. Steps that have ended computed `num_confirmed` of them. The first `num_shared` pages
    are the tree's, kept by a lock on `node`; the rest are its own. It is running while it has a `slot` (>= 0).
    """

    __slots__ = (
        "announced",
        "arrival",
        "arrived_s",
        "cached_estimate",
        "cached_tokens",
        "ended",
        "ends_at_limit",
        "estimated_at_step",
        "grammar",
        "last_token",
        "new_table",
        "node",
        "num_computed",
        "num_confirmed",
        "num_pending",
        "num_prompt",
        "num_sent_pages",
        "num_shared",
        "pages",
        "preempted",
        "priority",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "slot",
        "started_s",
        "stop_ids",
        "token_limit",
        "tokens",
    )

    def __init__(
        self, request: Generate, arrival: int, arrived_s: float, token_limit: int, eos_token_ids: frozenset[int]
    ) -> None:
        """`arrival` numbers requests in the order they came, `arrived_s` is the scheduler's clock then. It ends when
        it has `token_limit` tokens, prompt and output together."""
        self.request_id = request.request_id
        self.sampling: SamplingParams = request.sampling
        self.priority = request.priority
        self.arrival = arrival
        self.arrived_s = arrived_s
        self.started_s: float | None = None  # when it first ran
        self.token_limit = token_limit
        self.num_prompt = len(request.prompt_ids)
        self.tokens = IntRow(request.prompt_ids + request.output_ids)
        self.last_token = int(self.tokens.values[-1])
        stop_ids = frozenset(self.sampling.stop_token_ids)
        self.stop_ids = stop_ids if self.sampling.ignore_eos else stop_ids | eos_token_ids
        self.ends_at_limit = not self.stop_ids and self.sampling.grammar is None  # and never before
        self.preempted = False  # waits, and ran before
        self.grammar: GrammarState | None = None

        self.slot = -1
        self.new_table = False  # the ranks' row of the slot is another sequence's, or an outdated one of this
        self.num_computed = 0
        self.num_confirmed = 0
        self.num_pending = 0
        self.ended = False  # finished, failed or aborted: whatever is in flight of it is dropped
        self.pages = IntRow([])
        self.num_sent_pages = 0  # of `pages`, how many the ranks know
        self.num_shared = 0
        self.node: PagedNode | None = None
        self.cached_estimate = 0  # tokens that the tree had when it was last asked, while waiting
        self.estimated_at_step = -1

        self.announced = False  # its first output was sent
        self.cached_tokens = 0  # of the prompt, when it first ran
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.sampling.prompt_logprobs is not None and not request.output_ids:
            self.prompt_logprobs = [None]

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs that are known."""
        return self.tokens.size

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is yet to be computed. The last of them gives the logits of the next token."""
        return self.tokens.size + self.num_pending - self.num_computed

    @property
    def is_running(self) -> bool:
        return self.slot >= 0

    @property
    def rank(self) -> tuple[int, int]:
        """Ascending from the one that runs first: by priority, then by arrival. The last gives way for pages."""
        return (-self.priority, self.arrival)

    @property
    def place(self) -> tuple[int, bool, int]:
        """Ascending from the front of the waiting: by priority, then those that ran before, then by arrival."""
        return (-self.priority, not self.preempted, self.arrival)

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
        return self.tokens.size - 1

    def pages_missing(self, page_size: int) -> int:
        """Pages that it has yet to get for the tokens it has now."""
        return max(0, pages_for(self.tokens.size + self.num_pending, page_size) - self.pages.size)

    def output_ids(self) -> list[int]:
        return self.tokens.view(self.num_prompt, self.tokens.size).tolist()

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.last_token = token_id

    def failed(self, failure: Failure) -> Output:
        return Output(request_id=self.request_id, finish_reason="error", failure=failure)
