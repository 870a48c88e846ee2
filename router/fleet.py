"""What this router knows of its replicas, and the one act that chooses one for a request and books the load there.

For each replica there is an exact copy of its tree (kept by its events), the load it published last, and this router's
own bookings. A published load counts the bookings that the replica had received (`Load.bookings_seen`); younger ones
are added here, so that no request is counted late, or twice, and each router sees what the others send.

    place ──▶ unseen: its uncached tokens count as waiting ──first_token──▶ its prompt counts as context
                 └──── a Load with `bookings_seen` >= its number: the replica counts it ────▶ release
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from radix.mirror import Mirror
from radix.node import pack
from router.errors import NoReplica
from router.expected import Expected, marks, prefix_hashes
from router.placement import Candidate, Placement, Weights, least_load, rank, round_robin
from worker.messages import CacheEvents, Load

log = logging.getLogger(__name__)

PLACEMENTS: dict[str, Placement] = {"cache_aware": rank, "least_load": least_load, "round_robin": round_robin}
# `Candidate.recent_tokens` forgets by requests placed, not by time, so that it means the same at any rate.
RECENT_REQUESTS = 64
WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Booking:
    """A request's place. `number` is for `Generate.booking`; `cached_tokens` is how much of the prompt was expected to
    be cached there."""

    request_id: str
    replica_id: str
    number: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica for `/metrics` and `shoal status`.

    `load` is what it published last (None: nothing yet). `waiting_tokens` and `context_tokens` add to that the bookings
    that it does not count yet: placement goes by these. `mirror_tokens` is what it has cached, None while the router
    waits for a snapshot. `bookings` are this router's requests there.
    """

    replica_id: str
    load: Load | None
    waiting_tokens: int
    context_tokens: int
    mirror_tokens: int | None
    bookings: int


@dataclass(slots=True)
class _Booked:
    booking: Booking
    prompt_tokens: int
    has_first_token: bool = False


@dataclass(slots=True)
class _Replica:
    """`mirror` is None from a gap (or the start) to the next snapshot. `unseen` are the bookings that `load` does not
    count, in the order of their numbers."""

    recent_tokens: float
    mirror: Mirror | None = None
    incarnation: str = ""
    next_seq: int = 0
    load: Load | None = None
    last_number: int = 0
    num_bookings: int = 0
    unseen: dict[str, _Booked] = field(default_factory=dict)
    expected: Expected = field(default_factory=Expected)

    def candidate(self, replica_id: str, cached_tokens: int) -> Candidate:
        """This replica as placement sees it."""
        load = self.load or Load(incarnation="")
        waiting = [b.prompt_tokens - b.booking.cached_tokens for b in self.unseen.values() if not b.has_first_token]
        running = [b.prompt_tokens for b in self.unseen.values() if b.has_first_token]
        return Candidate(
            replica_id,
            cached_tokens=cached_tokens,
            waiting_tokens=load.waiting_tokens + sum(waiting),
            context_tokens=load.context_tokens + sum(running),
            running=load.running + len(running),
            waiting=load.waiting + len(waiting),
            recent_tokens=self.recent_tokens,
        )


class Fleet:
    """All methods may be called from any thread. Replicas that are not known (any more) and requests that are not
    booked are ignored, for messages cross on their way."""

    def __init__(
        self,
        placement: Literal["cache_aware", "least_load", "round_robin"] = "cache_aware",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives seconds."""
        self._rank = PLACEMENTS[placement]
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._booked: dict[str, _Booked] = {}
        self._turn = 0

    def join(self, replica_id: str) -> None:
        """A new connection to a replica, which will count this router's bookings from 1. Until its first snapshot and
        load it counts as empty and idle. Whatever was known of an earlier connection is forgotten."""
        with self._lock:
            self._forget(replica_id)
            # As much recent work as the one that had least: a newcomer is not flooded.
            least = min((replica.recent_tokens for replica in self._replicas.values()), default=0.0)
            self._replicas[replica_id] = _Replica(least)

    def leave(self, replica_id: str) -> None:
        """The replica is gone, and with it its cache, its load and all bookings on it."""
        with self._lock:
            self._forget(replica_id)

    def apply_events(self, replica_id: str, events: CacheEvents) -> bool:
        """Follows the replica's tree. False exactly when the caller must send `Subscribe`: there was a gap or the
        scheduler is a new one, and the mirror was dropped. What comes before the snapshot is then passed over."""
        if events.snapshot:
            mirror = _mirror(replica_id, events)  # before the lock: a snapshot may be large
            with self._lock:
                replica = self._replicas.get(replica_id)
                if replica is not None:
                    replica.mirror, replica.incarnation, replica.next_seq = mirror, events.incarnation, events.first_seq
            return True
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None or replica.mirror is None:
                return True
            if _follow(replica, events):
                return True
            log.warning("replica %s: cache events do not follow on what is known; asking for a snapshot", replica_id)
            replica.mirror = None
            return False

    def apply_load(self, replica_id: str, load: Load) -> None:
        """What the replica carries now."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None:
                return
            replica.load = load
            while replica.unseen:
                request_id, first = next(iter(replica.unseen.items()))
                if first.booking.number > load.bookings_seen:
                    break
                del replica.unseen[request_id]

    def place(self, request_id: str, prompt_ids: Sequence[int] | np.ndarray, candidates: Iterable[str]) -> Booking:
        """Chooses one of `candidates` (replica ids) for the prompt and books the request there, in one act.

        An earlier booking of the same request is replaced. Raises NoReplica, with nothing booked, if none of the
        candidates is known, and ValueError for what are no token ids.
        """
        prompt = pack(prompt_ids)
        hashes = prefix_hashes(np.frombuffer(prompt, dtype=np.int32))
        ends = [0, *marks(len(prompt_ids))]
        with self._lock:
            self._release(request_id)
            now = self._clock()
            choices = []
            for replica_id in sorted(self._replicas.keys() & set(candidates)):
                replica = self._replicas[replica_id]
                expected = ends[replica.expected.match(hashes, now)]
                cached = 0 if replica.mirror is None else replica.mirror.match_packed(prompt)
                # The last token is always computed: its logits are the answer's first token.
                cached = min(max(expected, cached), max(0, len(prompt_ids) - 1))
                choices.append(replica.candidate(replica_id, cached))
            if not choices:
                raise NoReplica()
            best = self._rank(choices, len(prompt_ids), WEIGHTS, self._turn)[0]
            self._turn += 1
            cached_tokens = next(choice.cached_tokens for choice in choices if choice.replica_id == best)
            booked = self._book(request_id, best, len(prompt_ids), cached_tokens)
            self._replicas[best].expected.add(hashes, now)
            return booked.booking

    def booking(self, request_id: str) -> Booking | None:
        """Where the request is booked."""
        with self._lock:
            booked = self._booked.get(request_id)
            return None if booked is None else booked.booking

    def first_token(self, request_id: str) -> None:
        """The request's prompt is computed: it no longer waits, it is context."""
        with self._lock:
            booked = self._booked.get(request_id)
            if booked is not None:
                booked.has_first_token = True

    def release(self, request_id: str) -> None:
        """The request has ended, whatever way."""
        with self._lock:
            self._release(request_id)

    def snapshot(self) -> list[ReplicaView]:
        """Every replica, by id."""
        with self._lock:
            return [self._view(replica_id, self._replicas[replica_id]) for replica_id in sorted(self._replicas)]

    def _view(self, replica_id: str, replica: _Replica) -> ReplicaView:
        seen = replica.candidate(replica_id, 0)
        return ReplicaView(
            replica_id,
            load=replica.load,
            waiting_tokens=seen.waiting_tokens,
            context_tokens=seen.context_tokens,
            mirror_tokens=None if replica.mirror is None else replica.mirror.num_tokens,
            bookings=replica.num_bookings,
        )

    def _book(self, request_id: str, replica_id: str, prompt_tokens: int, cached_tokens: int) -> _Booked:
        for replica in self._replicas.values():
            replica.recent_tokens *= 1 - 1 / RECENT_REQUESTS
        replica = self._replicas[replica_id]
        replica.recent_tokens += prompt_tokens - cached_tokens
        replica.last_number += 1
        replica.num_bookings += 1
        booked = _Booked(Booking(request_id, replica_id, replica.last_number, cached_tokens), prompt_tokens)
        self._booked[request_id] = booked
        replica.unseen[request_id] = booked
        return booked

    def _release(self, request_id: str) -> None:
        booked = self._booked.pop(request_id, None)
        if booked is not None:
            replica = self._replicas[booked.booking.replica_id]
            replica.num_bookings -= 1
            replica.unseen.pop(request_id, None)

    def _forget(self, replica_id: str) -> None:
        if self._replicas.pop(replica_id, None) is not None:
            gone = [name for name, booked in self._booked.items() if booked.booking.replica_id == replica_id]
            for request_id in gone:
                del self._booked[request_id]


def _mirror(replica_id: str, snapshot: CacheEvents) -> Mirror | None:
    """The mirror of a snapshot. None, as if the replica had no cache, if it contradicts itself: asking for it again
    would get the same."""
    try:
        mirror = Mirror(snapshot.page_size)
        for event in snapshot.events:
            mirror.apply(event)
    except ValueError as error:
        log.error("replica %s sent a snapshot of its cache that is none: %s", replica_id, error)
        return None
    return mirror


def _follow(replica: _Replica, events: CacheEvents) -> bool:
    """Applies the next events to the replica's mirror; False, with the mirror spoilt, if they are not the next."""
    mirror = replica.mirror
    assert mirror is not None
    known = (replica.incarnation, replica.next_seq, mirror.page_size)
    if (events.incarnation, events.first_seq, events.page_size) != known:
        return False
    try:
        for event in events.events:
            mirror.apply(event)
    except ValueError:
        return False
    replica.next_seq += len(events.events)
    return True
