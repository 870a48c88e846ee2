"""Admission: which waiting sequences start, in the order of the queue, while there are slots, tokens and pages."""

from collections.abc import Callable, Iterator

import numpy as np

from worker.config import WorkerConfig
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.kv_demand import PeakKVEstimator
from worker.scheduler.running import RunningSequences
from worker.scheduler.sequence import Sequence, pages_for
from worker.scheduler.sequence_table import SequenceTable
from worker.scheduler.step_builder import StepBuilder
from worker.scheduler.waiting_queue import QueueOrder, WaitingQueue

# Steps after which admission is tried again even if no sequence has arrived or left.
RETRY_STEPS = 16


class Admission:
    """The sequences without a slot, from arrival or preemption until they start or are removed.

    - `queue`: sequences that may start.
    - `held`: sequences whose grammar is being compiled.
    """

    def __init__(
        self,
        config: WorkerConfig,
        holdings: KVCacheManager,
        table: SequenceTable[Sequence],
        clock: Callable[[], float],
        order: QueueOrder,
    ) -> None:
        self.queue = WaitingQueue(config.starvation_s, holdings.cached_tokens, order)
        self.held: dict[str, Sequence] = {}  # by request id
        self.kv_demand = PeakKVEstimator(holdings.page_size)
        self._holdings = holdings
        self._page_size = holdings.page_size
        self._table = table
        self._clock = clock
        self._num_changes = 0  # how often a sequence was added or left
        self._blocked_at: tuple[int, int] | None = None  # `_comings` when a sequence last found no room

    def __len__(self) -> int:
        return len(self.queue) + len(self.held)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.queue
        yield from self.held.values()

    @property
    def rows(self) -> np.ndarray:
        """Rows of all these sequences in the `SequenceTable`, int64."""
        held = np.array([seq.row for seq in self.held.values()], dtype=np.int64)
        return np.concatenate((self.queue.rows, held))

    def add(self, seq: Sequence, step: int, ready: bool = True) -> None:
        """Adds a sequence. With `ready` False, it does not start before `release`."""
        self._num_changes += 1
        if self.queue.order is QueueOrder.LONGEST_OUTPUT:
            seq.expected_tokens = seq.num_tokens + self.kv_demand.expected_tokens(seq)
        if ready:
            self.queue.add(seq, step)
        else:
            self.held[seq.request_id] = seq

    def release(self, request_id: str, step: int) -> Sequence:
        """Moves a sequence from `held` to the queue. Returns it. Raises KeyError if there is none with this id."""
        seq = self.held.pop(request_id)
        self.add(seq, step)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence that has ended without a slot."""
        self._num_changes += 1
        if self.held.pop(seq.request_id, None) is None:
            self.queue.remove(seq)

    def is_blocked(self, step: int) -> bool:
        """Whether the next sequence to start found no room, and nothing has changed since."""
        return self._blocked_at == self._comings(step)

    def vacated(self) -> None:
        """Called when a running sequence has given up its slot and pages."""
        self._num_changes += 1

    def starting(
        self, running: RunningSequences, batch: StepBuilder, step: int, before: Sequence | None = None
    ) -> Iterator[Sequence]:
        """Yields the sequences that start now. With `before`, a running prefill, only those at least as urgent.

        Each holds its cached prefix. The caller gives it a slot and its first chunk before it asks for the next one. A
        sequence that does not fit blocks those behind it, or a long prompt would wait forever. A sequence whose prefix
        another one is computing does not block them.
        """
        if self.is_blocked(step):
            return
        comings = self._comings(step)
        table, rows = self._table, running.rows
        growth = -(-(table.token_limit[rows] - 1) // self._page_size) - table.num_pages[rows]
        self.kv_demand.begin(running, int(np.maximum(growth, 0).sum()))
        now_s = self._clock()
        limit = None if before is None else self.queue.urgency(before, now_s)
        for seq in self.queue.in_order(step, now_s):
            if limit is not None and self.queue.urgency(seq, now_s) > limit:
                return
            if not batch.may_start(seq):
                return
            if batch.computes_prefix_of(seq):
                self.queue.outdate(seq, step)
                continue  # also a starved one: it is next anyway, and then has less to compute
            if not self._open(seq, len(running) > 0):
                self._blocked_at = comings
                return
            self.queue.remove(seq)
            yield seq
            self.kv_demand.start(seq)

    def _comings(self, step: int) -> tuple[int, int]:
        """A value that changes whenever a sequence that found no room should try again."""
        return self._num_changes, step // RETRY_STEPS

    def _open(self, seq: Sequence, others_run: bool) -> bool:
        """Acquires the cached prefix of a sequence if there are pages for its tokens and, by the forecast, for the
        future tokens of it and the running sequences. Returns whether it did."""
        available = self._holdings.num_available
        least = pages_for(seq.num_tokens, self._page_size) - pages_for(seq.cached_estimate, self._page_size)
        if others_run and least > available:
            return False  # without the cost of a lookup in the tree
        self._holdings.acquire_prefix(seq)
        if self.kv_demand.has_room(seq, self._holdings.num_available):
            return True
        self._holdings.free(seq, keep=False)
        return False
