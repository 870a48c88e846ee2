"""A sequence: one request while the replica works on it."""

from typing import TYPE_CHECKING

import numpy as np

from radix.salt import salted
from worker.messages import Generate, SamplingParams, TokenLogprobs
from worker.scheduler.fair_share import ClientShare
from worker.scheduler.pool import Pool
from worker.scheduler.sequence_table import SequenceTable, TableColumn

if TYPE_CHECKING:
    from radix.tree import PagedNode
    from worker.lengths import LengthEstimate, PredictedLength
    from worker.structured_output import GrammarState


def pages_for(tokens: int, page_size: int) -> int:
    """Number of pages for `tokens` tokens."""
    return -(-tokens // page_size)


class IntBuffer:
    """A growable array of int32 without a length of its own: the owner knows how many entries are in use."""

    __slots__ = ("values",)

    def __init__(self, values: list[int]) -> None:
        self.values = np.array(values, dtype=np.int32)

    def write(self, start: int, values: np.ndarray | list[int]) -> None:
        """Writes integers that fit into 32 bits to `start` and the entries after it."""
        end = start + len(values)
        if end > len(self.values):
            self._grow(end)
        self.values[start:end] = values

    def write_one(self, index: int, value: int) -> None:
        """Writes one integer."""
        if index >= len(self.values):
            self._grow(index + 1)
        self.values[index] = value

    def _grow(self, needed: int) -> None:
        values = np.empty(max(16, needed, 2 * len(self.values)), dtype=np.int32)
        values[: len(self.values)] = self.values
        self.values = values


class Sequence:
    """The state of one request, owned and changed by the scheduler alone.

    Its counters are in a row of `SequenceTable`, which owns and describes them. It runs while it has a slot
    (`slot >= 0`). Its first `num_shared` pages belong to the tree, kept by a lock on `node`; the other pages are its
    own.
    """

    num_tokens = TableColumn()
    num_pending = TableColumn()
    num_computed = TableColumn()
    num_confirmed = TableColumn()
    num_prompt = TableColumn()
    token_limit = TableColumn()
    expected_tokens = TableColumn()
    num_pages = TableColumn()
    gives_way_from = TableColumn()
    start_step = TableColumn()
    num_sent_pages = TableColumn()
    num_shared = TableColumn()
    first_window_page = TableColumn()
    cached_estimate = TableColumn()
    last_token = TableColumn()
    slot = TableColumn()
    job = TableColumn()
    adapter = TableColumn()
    adapter_slot = TableColumn()

    __slots__ = (
        "_token_ids",
        "arrival",
        "arrived_s",
        "blocked_step",
        "cache_salt",
        "cached_tokens",
        "ends_at_limit",
        "estimated_at_step",
        "gave_way",
        "grammar",
        "head_start_s",
        "lease",
        "length",
        "new_token_ids",
        "node",
        "pinned",
        "pool",
        "prediction_ids",
        "priority",
        "prompt_logprobs",
        "request_id",
        "row",
        "sampling",
        "share",
        "started_s",
        "stop_ids",
        "table",
        "tables",
        "targets",
    )

    def __init__(
        self,
        request: Generate,
        table: "SequenceTable[Sequence]",
        *,
        arrival: int,
        arrived_s: float,
        token_limit: int,
        eos_token_ids: frozenset[int],
        share: ClientShare,
        adapter: int = 0,
    ) -> None:
        """Takes a row in `table`.

        - `arrival`: number of the request, in the order of arrival.
        - `arrived_s`: the scheduler's clock at arrival.
        - `token_limit`: prompt + output tokens with which the sequence ends.
        - `share`: the client's, in the order of the queue.
        - `adapter`: number of its adapter, 0 for the base model.
        """
        self.request_id = request.request_id
        self.sampling: SamplingParams = request.sampling
        self.priority = request.priority
        self.head_start_s = request.head_start_s
        self.lease = request.lease
        self.cache_salt = request.prefix_salt
        self.prediction_ids = request.prediction_ids
        self.arrival = arrival
        self.arrived_s = arrived_s
        self.started_s: float | None = None  # when it first ran
        self.blocked_step: int | None = None  # the step for which it first found no room
        self.gave_way = False  # whether it was preempted last for another client, and not because pages ran out
        stop_ids = frozenset(self.sampling.stop_token_ids)
        self.stop_ids = stop_ids if self.sampling.ignore_eos else stop_ids | eos_token_ids
        pooling = self.sampling.pooling
        self.pool = None if pooling is None else Pool(pooling, len(request.prompt_ids))
        no_stop = not self.stop_ids and self.sampling.grammar is None
        self.ends_at_limit = no_stop or self.pool is not None  # nothing else can end it
        self.length: PredictedLength | None = None  # of the output, if that is not known
        self.grammar: GrammarState | None = None

        self.table = table
        self.row = table.add(self)
        self.num_prompt = len(request.prompt_ids)
        self.num_tokens = self.num_prompt + len(request.output_ids)
        self.token_limit = token_limit
        self.adapter = adapter
        table.last_output_s[self.row] = arrived_s
        self.share = share
        table.client[self.row] = share.index
        self._token_ids = IntBuffer(request.prompt_ids + request.output_ids)
        self.new_token_ids: list[int] = []  # the newest known tokens, which `token_ids` moves to the array
        self.last_token = int(self._token_ids.values[-1])

        # By group with pages: the first `num_pages` entries are its pages, of which it may have given some back.
        self.tables = [IntBuffer([])]
        self.node: PagedNode | None = None
        self.pinned: PagedNode | None = None  # whose resume point it keeps, as long as it reads a part of it
        self.targets: list[int] = []  # positions at which others are to continue its prompt, not reached yet; ascending
        self.estimated_at_step = -1

        self.cached_tokens = 0  # cached part of the prompt when it first ran
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.sampling.prompt_logprobs is not None and not request.output_ids:
            self.prompt_logprobs = [] if self.sampling.prompt_logprobs_start else [None]

    @property
    def estimate(self) -> "LengthEstimate | None":
        """The predicted length of the output; None if nothing is predicted."""
        return None if self.length is None else self.length.estimate

    @property
    def num_known(self) -> int:
        """Tokens whose value the host knows."""
        return self.num_tokens - self.num_pending

    @property
    def num_missing(self) -> int:
        """Remaining tokens: those whose KV no step computes yet. The last one gives the logits of the next token."""
        return self.num_tokens - self.num_computed

    @property
    def is_running(self) -> bool:
        return self.slot >= 0

    @property
    def is_preempted(self) -> bool:
        """Whether it waits because it was preempted: it has started before."""
        return self.started_s is not None and not self.is_running

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of running sequences, ascending: priority, then arrival. The last sequence is preempted first."""
        return (-self.priority, self.arrival)

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log probabilities of prompt tokens are asked for, and some are still to be computed."""
        return self.prompt_logprobs is not None and self._num_scored < self.num_prompt

    @property
    def reusable_tokens(self) -> int:
        """How many leading tokens may come from the cache. The last token may not: it gives the logits of the next one.
        Nor may prompt tokens that give log probabilities still to be computed, or that are averaged."""
        if self.pool is not None and self.pool.takes_all:
            return 0
        return (self._num_scored if self.wants_prompt_logits else self.num_known) - 1

    @property
    def _num_scored(self) -> int:
        """Leading prompt tokens whose log probabilities are known or not asked for."""
        return self.sampling.prompt_logprobs_start + len(self.prompt_logprobs or ())

    def pages_missing(self, page_size: int) -> int:
        """Pages that are still to be allocated for the tokens that the sequence has now."""
        return max(0, pages_for(self.num_tokens, page_size) - self.num_pages)

    def token_ids(self, start: int, end: int) -> np.ndarray:
        """The known tokens from position `start` to `end - 1`, int32. A view, valid until the sequence gets tokens."""
        num_known = self.num_known
        if self.new_token_ids:
            self._token_ids.write(num_known - len(self.new_token_ids), self.new_token_ids)
            self.new_token_ids.clear()
        return self._token_ids.values[start : min(end, num_known)]

    def output_ids(self) -> list[int]:
        """The known output tokens."""
        return self.token_ids(self.num_prompt, self.num_tokens).tolist()

    def cache_keys(self, end: int) -> np.ndarray:
        """The tokens before position `end` as the prefix tree knows them, int32."""
        known = self.token_ids(0, end)
        return salted(known, self.cache_salt) if self.cache_salt else known

    def shares_prefix(self, other: "Sequence", end: int) -> bool:
        """Whether both have the same tokens at all positions before `end`, and the same salt."""
        return self.cache_salt == other.cache_salt and np.array_equal(self.token_ids(0, end), other.token_ids(0, end))

    def common_tokens(self, other: "Sequence", end: int) -> int:
        """How many leading tokens before position `end` both have alike; 0 with another salt."""
        if self.cache_salt != other.cache_salt:
            return 0
        own, its = self.token_ids(0, end), other.token_ids(0, end)
        length = min(len(own), len(its))
        differs = own[:length] != its[:length]
        return int(differs.argmax()) if differs.any() else length

    def pages(self, start: int, end: int) -> np.ndarray:
        """Pages number `start` to `end - 1` of the sequence in the first group, at most its `num_pages`, int32. A
        view."""
        return self.tables[0].values[start:end]

    @property
    def own_pages(self) -> np.ndarray:
        """The pages that do not belong to the tree, int32. A view."""
        return self.pages(self.num_shared, self.num_pages)
