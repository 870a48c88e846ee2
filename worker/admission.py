"""Which waiting sequence starts: while there are slots, tokens and pages, in the order of the queue."""

from collections.abc import Callable, Iterator

import numpy as np

from worker.batch import Batch
from worker.config import WorkerConfig
from worker.counts import Counts
from worker.forecast import Forecast
from worker.holdings import Holdings
from worker.request import Sequence, pages_for
from worker.running import Running
from worker.waiting import WaitingQueue

# A sequence that found no room tries again after so many steps even if nobody has come or gone.
RETRY_STEPS = 16


class Admission:
    """The sequences without a slot, from their arrival or preemption until they start or are removed: those that wait
    in the queue, and those whose grammar compiles."""

    def __init__(
        self,
        config: WorkerConfig,
        holdings: Holdings,
        counts: Counts,
        clock: Callable[[], float],
        longest_first: bool = False,
    ) -> None:
        """`longest_first`: see `WaitingQueue`."""
        self.queue = WaitingQueue(config.starvation_s, holdings.cached_tokens, longest_first)
        self._longest_first = longest_first
        self.held: dict[str, Sequence] = {}  # not ready: their grammar compiles
        self.forecast = Forecast(holdings.page_size)
        self._holdings = holdings
        self._page_size = holdings.page_size
        self._counts = counts
        self._clock = clock
        self._num_changes = 0  # how often somebody came or went
        self._blocked_at: tuple[int, int] | None = None  # when a waiting sequence last found no room

    def __len__(self) -> int:
        return len(self.queue) + len(self.held)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.queue
        yield from self.held.values()

    @property
    def rows(self) -> np.ndarray:
        """Theirs in the counts, int64."""
        held = np.array([seq.row for seq in self.held.values()], dtype=np.int64)
        return np.concatenate((self.queue.rows, held))

    def add(self, seq: Sequence, step: int, ready: bool = True) -> None:
        """With `ready` False it is not started until `release`."""
        self._num_changes += 1
        if self._longest_first:  # nobody else asks
            seq.num_expected = seq.num_tokens + self.forecast.to_come(seq)
        if ready:
            self.queue.add(seq, step)
        else:
            self.held[seq.request_id] = seq

    def release(self, request_id: str, step: int) -> Sequence:
        """One that was not ready may start now. Returns it. Raises KeyError if there is none of this name."""
        seq = self.held.pop(request_id)
        self.add(seq, step)
        return seq

    def remove(self, seq: Sequence) -> None:
        """It has ended without a slot."""
        self._num_changes += 1
        if self.held.pop(seq.request_id, None) is None:
            self.queue.remove(seq)

    def is_blocked(self, step: int) -> bool:
        """Whether the next to start has found no room, and nothing has changed since."""
        return self._blocked_at == self._comings(step)

    def vacated(self) -> None:
        """A running sequence has given up its slot and pages."""
        self._num_changes += 1

    def starting(self, running: Running, batch: Batch, step: int) -> Iterator[Sequence]:
        """Sequences that start beside those that run: each holds what is cached of it, and is to be given a slot and
        its first chunk before the next one is asked for. One that does not fit holds up those behind it, or a long
        prompt would wait forever; one whose prefix is being computed does not."""
        if self.is_blocked(step):
            return
        comings = self._comings(step)
        counts, rows = self._counts, running.rows
        growth = -(-(counts.limit[rows] - 1) // self._page_size) - counts.pages[rows]
        self.forecast.begin(running, int(np.maximum(growth, 0).sum()))
        for seq in self.queue.in_order(step, self._clock()):
            if not batch.may_start(seq):
                return
            if batch.computes_prefix_of(seq):
                self.queue.outdate(seq, step)
                continue  # even one that starves, since it has less to compute then, and is next
            if not self._open(seq, len(running) > 0):
                self._blocked_at = comings
                return
            self.queue.remove(seq)
            yield seq
            self.forecast.start(seq)

    def _comings(self, step: int) -> tuple[int, int]:
        """Something else whenever a sequence that found no room should try again."""
        return self._num_changes, step // RETRY_STEPS

    def _open(self, seq: Sequence, others_run: bool) -> bool:
        """Begins to hold what is cached of a sequence, if there are pages for all the tokens that it has now beside
        what it and the running ones are going to need."""
        available = self._holdings.num_available
        least = pages_for(seq.num_tokens, self._page_size) - pages_for(seq.cached_estimate, self._page_size)
        if others_run and least > available:
            return False  # without asking the tree
        self._holdings.open(seq)
        if self.forecast.has_room(seq, self._holdings.num_available):
            return True
        self._holdings.close(seq, keep=False)
        return False
