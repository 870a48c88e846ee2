"""Admission: which waiting sequences start, in the order of the queue, while there are slots, tokens and pages."""

from collections.abc import Iterator

import numpy as np

from worker.config import WorkerConfig
from worker.lengths import OutputLengthPredictor
from worker.scheduler.adapter_slots import AdapterSlots
from worker.scheduler.fair_share import FairShare
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.kv_demand import PeakKVEstimator
from worker.scheduler.running import RunningSequences
from worker.scheduler.sequence import Sequence, pages_for
from worker.scheduler.sequence_table import SequenceTable
from worker.scheduler.step_builder import StepBuilder
from worker.scheduler.waiting_queue import QueueOrder, WaitingQueue

# Steps after which admission is tried again even if no sequence has arrived or left. For as many steps after one found
# no pages, pages count as short.
RETRY_STEPS = 16
# Most tokens that count for an output of which too little is known: a limit that the client has not set is that of the
# context, and says nothing.
UNKNOWN_TOKENS = 256
PREDICTIONS = 4  # waiting sequences whose outputs are predicted again when an output has ended
SPARE = 4  # candidates beyond the free slots: some may wait for a prefix that another sequence computes


class Admission:
    """The sequences without a slot, from arrival or preemption until they start or are removed.

    - `queue`: sequences that may start.
    - `held`: sequences whose grammar is being compiled.
    """

    def __init__(
        self,
        config: WorkerConfig,
        running: RunningSequences,
        kv_cache: KVCacheManager,
        adapters: AdapterSlots,
        table: SequenceTable[Sequence],
        order: QueueOrder,
        shares: FairShare,
    ) -> None:
        self.queue = WaitingQueue(config.starvation_s, kv_cache.cached_tokens, order, table, shares)
        self.held: dict[str, Sequence] = {}  # by request id
        self.kv_demand = PeakKVEstimator(kv_cache.page_size)
        self._running = running
        self._adapters = adapters
        self._starvation_s = config.starvation_s
        self._now_s = 0.0  # of the step that is built
        self._kv_cache = kv_cache
        self._page_size = kv_cache.page_size
        self._table = table
        self._num_changes = 0  # how often a sequence was added or left
        self._blocked_at: tuple[int, int] | None = None  # `_comings` when a sequence last found no room
        self._blocked_step = -RETRY_STEPS  # the step for which that was
        self._builder: StepBuilder  # of the step that is built
        self._step = 0
        self._is_closed = True  # whether no sequence may start in this step any more
        self._has_forecast = False  # whether `kv_demand` knows the pages that running sequences hold now

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
        self._expect(seq)
        if ready:
            self.queue.add(seq, step)
        else:
            self.held[seq.request_id] = seq

    def predict_again(self, lengths: OutputLengthPredictor) -> None:
        """Predicts the outputs of the next few waiting sequences again, in turn: called when an output has ended. Most
        of a job arrives before anything has been learned."""
        for seq in self.queue.to_predict(PREDICTIONS):
            if seq.length is not None:
                seq.length = lengths.again(seq.length)
                self._expect(seq)

    def add_preempted(self, seq: Sequence) -> None:
        """Adds a sequence that was preempted for the step that is built."""
        self.kv_demand.preempt()
        self.add(seq, self._step)

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

    def vacated(self, seq: Sequence) -> None:
        """Called when a running sequence has given up its slot and pages."""
        self._adapters.release(seq)
        self._num_changes += 1

    def begin(self, builder: StepBuilder, step: int) -> None:
        """Begins a new step, the one after number `step`. The next calls of `candidates` and `admit` refer to it."""
        self._builder, self._step = builder, step
        self._is_closed = self.is_blocked(step)
        self._has_forecast = False
        self._adapters.begin()

    def candidates(self, now_s: float) -> list[Sequence]:
        """The waiting sequences of which some may start in this step, those that should start first at the front."""
        self._now_s = now_s
        if not self._is_open:
            return []
        orders = QueueOrder.SHORTEST_PREFILL, QueueOrder.LONGEST_PREFIX
        if self.queue.order is QueueOrder.LEAST_WORK or (self._is_short and self.queue.order in orders):
            return self.queue.most_due(self._running.num_free + SPARE, self._step, now_s)
        return self.queue.by_urgency(self.queue.window(self._step), now_s)

    def admit(self, seq: Sequence) -> bool:
        """Lets a waiting sequence start if there are a slot, tokens and pages for it. Returns whether it does.

        Then it holds its cached prefix. The caller gives it a slot and its first chunk, and then calls `started`.
        Candidates are to be tried in the order of their urgency: one that does not fit closes the step to those behind
        it, or a long prompt would wait forever. A sequence whose prefix another one is computing does not close it, nor
        does one whose adapter has no place on the device.
        """
        if not self._is_open:
            return False
        if not self._builder.may_start(seq):
            self._is_closed = True
            return False
        if self._kv_cache.reuses_prefixes and self._builder.computes_prefix_of(seq):
            self.queue.outdate(seq, self._step)
            return False  # also a starved one: it is next anyway, and then has less to compute
        if not self._adapters.has_room(seq, self._now_s - seq.arrived_s > self._starvation_s):
            return False
        if not self._open(seq):
            self._blocked_at = self._comings(self._step)
            self._blocked_step = self._step
            self._is_closed = True
            return False
        self.queue.remove(seq)
        self._adapters.acquire(seq)
        return True

    def started(self, seq: Sequence) -> None:
        """Called when an admitted sequence has its first chunk."""
        self.kv_demand.start(seq)

    def running_grew(self) -> None:
        """Called when a running sequence may have got pages."""
        self._has_forecast = False

    @property
    def _is_open(self) -> bool:
        """Whether a sequence could still start in this step. Pages that a preemption has just freed are for running
        sequences."""
        return (
            len(self.queue) > 0
            and not self._is_closed
            and not self._builder.has_preempted
            and self._running.has_room
            and self._builder.budget.tokens_left > 0
        )

    @property
    def _is_short(self) -> bool:
        """Whether slots or pages are short: not all waiting sequences can start now."""
        return len(self.queue) > self._running.num_free or self._step < self._blocked_step + RETRY_STEPS

    def _expect(self, seq: Sequence) -> None:
        """Sets the expected length of a sequence."""
        to_come = self.kv_demand.expected_tokens(seq)
        is_known = seq.ends_at_limit or seq.estimate is not None
        if not is_known and self.queue.order is not QueueOrder.LONGEST_OUTPUT:
            to_come = min(to_come, UNKNOWN_TOKENS)
        seq.expected_tokens = seq.num_tokens + to_come

    def _comings(self, step: int) -> tuple[int, int]:
        """A value that changes whenever a sequence that found no room should try again."""
        return self._num_changes, step // RETRY_STEPS

    def _open(self, seq: Sequence) -> bool:
        """Acquires the cached prefix of a sequence if there are pages for its tokens and, by the forecast, for the
        future tokens of it and the running sequences. Returns whether it did.

        While sequences run, leased pages are kept from those that start: the prompt of the next call of that program
        would have to be computed again. Running sequences may take them, and a sequence that would run alone."""
        least = pages_for(seq.num_tokens, self._page_size) - pages_for(seq.cached_estimate, self._page_size)
        if len(self._running) and least > self._kv_cache.num_unreserved:
            return False  # without the cost of a lookup in the tree
        self._kv_cache.acquire_prefix(seq)
        available = self._kv_cache.num_unreserved if len(self._running) else self._kv_cache.num_available
        if self._forecast().has_room(seq, available) and self._kv_cache.has_windows_for(seq, self._running.rows):
            return True
        self._kv_cache.free(seq, keep=False)
        return False

    def _forecast(self) -> PeakKVEstimator:
        """The forecast for the sequences that run now."""
        if not self._has_forecast:
            table, rows = self._table, self._running.rows
            growth = -(-(table.token_limit[rows] - 1) // self._page_size) - table.num_pages[rows]
            self.kv_demand.begin(self._running, int(np.maximum(growth, 0).sum()))
            self._has_forecast = True
        return self.kv_demand
