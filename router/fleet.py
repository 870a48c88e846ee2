"""A router's view of its replicas, and the atomic operation that chooses a replica for a request and books the load
there.

For each replica the fleet keeps an exact mirror of its radix tree (updated by its cache events), the load that it
published last, and this router's own bookings. A published load counts all bookings that the replica had received by
then (`ReplicaLoad.bookings_seen`), from every router. Younger bookings are "unseen", and the fleet adds them to the
load. So each request is counted at once and only once, and each router sees the requests of the others.

    place ──▶ unseen: its uncached tokens count as waiting ──first_token──▶ its prompt counts as context
                 └── a ReplicaLoad with `bookings_seen` >= its number: the replica counts it ──▶ release
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from radix.mirror import Mirror
from radix.node import pack
from router.errors import NoReplica
from router.optimistic_prefixes import OptimisticPrefixes, marks, prefix_hashes
from router.placement import Candidate, Placement, Weights, least_load, rank, round_robin
from router.programs import Home
from worker.messages import CacheEvents, ReplicaLoad

log = logging.getLogger(__name__)

PLACEMENTS: dict[str, Placement] = {"cache_aware": rank, "least_load": least_load, "round_robin": round_robin}
# `Candidate.recent_tokens` decays with each request placed, not with time, so that it means the same at any load.
RECENT_REQUESTS = 64
WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Booking:
    """The replica that a request was placed on. `number` goes into `Generate.booking`. `cached_tokens`: how much of the
    prompt was expected to be cached there."""

    request_id: str
    replica_id: str
    number: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica for `/metrics` and `shoal status`.

    | field | meaning |
    | --- | --- |
    | `load` | the load that it published last; None if none yet |
    | `waiting_tokens`, `context_tokens` | the same fields of `load`, plus unseen bookings: placement uses these |
    | `mirror_tokens` | tokens in its cache; None while the router waits for a snapshot |
    | `bookings` | this router's requests there |
    """

    replica_id: str
    load: ReplicaLoad | None
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
    """Everything known about one replica. `mirror` is None from a gap in the events (or the start) to the next
    snapshot. `unseen` are the bookings that `load` does not count yet, in order of their numbers."""

    recent_tokens: float
    mirror: Mirror | None = None
    incarnation: str = ""
    next_seq: int = 0
    load: ReplicaLoad | None = None
    last_number: int = 0
    num_bookings: int = 0
    unseen: dict[str, _Booked] = field(default_factory=dict)
    expected: OptimisticPrefixes = field(default_factory=OptimisticPrefixes)

    def candidate(self, replica_id: str, cached_tokens: int) -> Candidate:
        """The replica as placement sees it. `cached_tokens`: its longest cached prefix of the prompt to be placed."""
        load = self.load or ReplicaLoad(incarnation="")
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
    """All replicas of one router. Every method may be called from any thread. Unknown replicas and requests without a
    booking are ignored, because messages cross on their way."""

    def __init__(
        self,
        placement: Literal["cache_aware", "least_load", "round_robin"] = "cache_aware",
        clock: Callable[[], float] = time.monotonic,
        turn: int | None = None,
    ) -> None:
        """`clock` returns seconds. `turn`: which of several equal replicas gets the first request. The default is
        random: routers that all began with the same replica would crowd it."""
        self._rank = PLACEMENTS[placement]
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._booked: dict[str, _Booked] = {}
        self._turn = random.getrandbits(32) if turn is None else turn

    def join(self, replica_id: str) -> None:
        """Registers a new connection to a replica, which counts this router's bookings from 1 again. Until its first
        snapshot and load, the replica counts as empty and idle. Everything known from an earlier connection is
        forgotten."""
        with self._lock:
            self._forget(replica_id)
            # Starts with the least recent work of all replicas: with none it would be flooded.
            least = min((replica.recent_tokens for replica in self._replicas.values()), default=0.0)
            self._replicas[replica_id] = _Replica(least)

    def leave(self, replica_id: str) -> None:
        """Forgets a replica that is gone: its cache, its load and all bookings on it."""
        with self._lock:
            self._forget(replica_id)

    def apply_events(self, replica_id: str, events: CacheEvents) -> bool:
        """Updates the replica's mirror. Returns False exactly when the caller must send `Subscribe`: there was a gap in
        the events, or the scheduler is a new incarnation, so the mirror was dropped. Events before the new snapshot are
        then ignored."""
        if events.snapshot:
            mirror = _mirror(replica_id, events)  # outside of the lock: a snapshot may be large
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
            log.warning("replica %s: a gap in its cache events; asking for a snapshot", replica_id)
            replica.mirror = None
            return False

    def apply_load(self, replica_id: str, load: ReplicaLoad) -> None:
        """Stores the load that the replica has published, and drops the bookings that it counts from `unseen`."""
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

    def place(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        candidates: Iterable[str],
        home: Home | None = None,
    ) -> Booking:
        """Chooses one of `candidates` (replica ids) for the prompt and books the request there, atomically. `home`: the
        replica that counts as having all tokens of the request's branch in its cache.

        Replaces an earlier booking of the same request. Raises NoReplica, with nothing booked, if no candidate is
        known, and ValueError for invalid token ids.
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
                if home is not None and replica_id == home.replica_id:
                    cached = max(cached, home.num_tokens)
                # The last token is always computed: its logits give the answer's first token.
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
        """The request's booking; None if it has none."""
        with self._lock:
            booked = self._booked.get(request_id)
            return None if booked is None else booked.booking

    def first_token(self, request_id: str) -> None:
        """Records that the request's prompt is computed: it counts as context now, no longer as waiting."""
        with self._lock:
            booked = self._booked.get(request_id)
            if booked is not None:
                booked.has_first_token = True

    def release(self, request_id: str) -> None:
        """Drops the request's booking, however the request ended."""
        with self._lock:
            self._release(request_id)

    def snapshot(self) -> list[ReplicaView]:
        """All replicas, sorted by id."""
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
    """The mirror of a snapshot. None, as if the replica had no cache, for a snapshot that contradicts itself: another
    snapshot would be the same."""
    try:
        mirror = Mirror(snapshot.page_size)
        for event in snapshot.events:
            mirror.apply(event)
    except ValueError as error:
        log.error("replica %s sent an invalid snapshot of its cache: %s", replica_id, error)
        return None
    return mirror


def _follow(replica: _Replica, events: CacheEvents) -> bool:
    """Applies the next events to the replica's mirror. Returns False, with the mirror spoilt, if these events are not
    the next."""
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
