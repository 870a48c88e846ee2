"""Pages for running sequences, and the preemption of other sequences when pages run out."""

from worker.scheduler.admission import Admission
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.running import RunningSequences
from worker.scheduler.sequence import Sequence, pages_for
from worker.scheduler.step_builder import StepBuilder
from worker.scheduler.steps_in_flight import StepsInFlight


class Preemption:
    """Finds room for the tokens of running sequences.

    When pages run out, cached pages are evicted first. Then the running sequence of the last rank (lowest priority,
    latest arrival) is preempted. Its computed pages go to the tree. It waits at the front of its priority, and resumes
    from the pages that are still cached.

    There is no deadlock: the sequence of the first rank can take every page in this way, and no sequence is accepted
    that needs more than all pages.
    """

    def __init__(
        self, running: RunningSequences, waiting: Admission, kv_cache: KVCacheManager, in_flight: StepsInFlight
    ) -> None:
        self.num_preempted = 0  # since the start
        self._running = running
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._in_flight = in_flight
        self._builder: StepBuilder  # of the step that is built
        self._is_ending = False

    def begin(self, builder: StepBuilder, is_ending: bool) -> None:
        """Begins a new step. `is_ending`: whether a running sequence is about to free its pages by ending with a step
        in flight. Then nothing is preempted."""
        self._builder, self._is_ending = builder, is_ending

    def make_room(self, seq: Sequence, tokens: int) -> int:
        """Allocates pages for `tokens` more tokens of a running sequence, or for as many as there are pages.

        Returns the number of tokens that fit now. Sequences of later ranks are preempted only if not even one does.
        """
        page_size = self._kv_cache.page_size
        room = seq.num_pages * page_size - seq.num_computed
        if room >= tokens:
            return room
        wanted = pages_for(tokens - room, page_size)
        pages = min(wanted, self._kv_cache.num_growable)
        while pages == 0 and room == 0 and not self._is_ending and self._running.last is not seq:
            self.preempt(self._running.last)
            pages = min(wanted, self._kv_cache.num_growable)
        if pages:
            self._kv_cache.allocate(seq, pages)
        return room + pages * page_size

    def preempt(self, seq: Sequence) -> None:
        """Returns a running sequence to the queue, while a step is built. Its known tokens are kept."""
        self._builder.preempt(seq)
        self._in_flight.preempt(seq)
        self.release(seq, keep=True)
        self._waiting.add_preempted(seq)
        self.num_preempted += 1

    def give_way(self, seq: Sequence) -> None:
        """Returns a running sequence to the queue, before a step is built, so that another client's has room."""
        self._in_flight.preempt(seq)
        self.release(seq, keep=True)
        self._waiting.add_given_way(seq)
        self.num_preempted += 1

    def release(self, seq: Sequence, keep: bool) -> None:
        """Frees a running sequence's slot and pages. `keep`: its computed pages go to the tree first."""
        self._kv_cache.free(seq, keep)
        self._waiting.vacated(seq)
        self._running.remove(seq)
