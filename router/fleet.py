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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np

from radix.node import pack
from router.errors import NoReplica
from router.known_replica import Booked, Booking, KnownReplica, mirror_of, pace_left
from router.optimistic_prefixes import marks, prefix_hashes
from router.placement import CANDIDATE, Placement, Weights, least_load, rank, round_robin
from router.popularity import Popularity
from router.programs import Home
from router.queue_wait import ShortestQueue, wait_s
from worker.messages import CacheEvents, ReplicaLoad

log = logging.getLogger(__name__)

PLACEMENTS: dict[str, Placement] = {"cache_aware": rank, "least_load": least_load, "round_robin": round_robin}
WEIGHTS = Weights()
_row = attrgetter(*(CANDIDATE.names or ()))


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
        self._replicas: dict[str, KnownReplica] = {}
        # A row for each replica, without what depends on the prompt. `_stale` are those that have changed since.
        self._table = np.zeros(0, dtype=CANDIDATE)
        self._heard = np.zeros((0, 2))  # of each row, `ArrivalPace.seconds` and `ArrivalPace.heard_s`
        self._rows: dict[str, int] = {}
        self._stale: set[str] = set()
        self._booked: dict[str, Booked] = {}
        self._popularity = Popularity()
        self._turn = random.getrandbits(32) if turn is None else turn

    def join(self, replica_id: str) -> None:
        """Registers a new connection to a replica, which counts this router's bookings from 1 again. Until its first
        snapshot and load, the replica counts as empty and idle. Everything known from an earlier connection is
        forgotten."""
        with self._lock:
            self._forget(replica_id)
            self._replicas[replica_id] = KnownReplica(replica_id)
            self._make_table()

    def leave(self, replica_id: str) -> None:
        """Forgets a replica that is gone: its cache, its load and all bookings on it."""
        with self._lock:
            self._forget(replica_id)
            self._make_table()

    def apply_events(self, replica_id: str, events: CacheEvents) -> bool:
        """Updates the replica's mirror. Returns False exactly when the caller must send `Subscribe`: there was a gap in
        the events, or the scheduler is a new incarnation, so the mirror was dropped. Events before the new snapshot are
        then ignored."""
        if events.snapshot:
            mirror = mirror_of(replica_id, events)  # outside of the lock: a snapshot may be large
            with self._lock:
                replica = self._replicas.get(replica_id)
                if replica is not None:
                    replica.mirror, replica.incarnation, replica.next_seq = mirror, events.incarnation, events.first_seq
            return True
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None or replica.mirror is None or replica.take_events(events):
                return True
            log.warning("replica %s: a gap in its cache events; asking for a snapshot", replica_id)
            return False

    def apply_load(self, replica_id: str, load: ReplicaLoad) -> None:
        """Stores the load that the replica has published."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is not None:
                replica.take_load(load, self._clock())
                self._stale.add(replica_id)

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
        prompt, num_tokens = pack(prompt_ids), len(prompt_ids)
        hashes, ends = prefix_hashes(np.frombuffer(prompt, dtype=np.int32)), marks(num_tokens)
        with self._lock:
            self._release(request_id)
            names = sorted(self._replicas.keys() & set(candidates))
            if not names:
                raise NoReplica()
            choices = self._candidates(names)
            choices["cached_tokens"] = cached = self._cached(names, prompt, hashes, ends, home)
            choices["wanted_tokens"] = self._popularity.wanted_tokens(hashes, ends, cached)
            self._popularity.add(hashes, len(names))
            best = int(self._rank(choices, num_tokens, WEIGHTS, self._turn)[0])
            self._turn += 1
            booked = self._book(request_id, names[best], num_tokens, int(cached[best]))
            self._replicas[names[best]].expected.add(hashes, self._clock())
            return booked.booking

    def shortest_queue(self) -> ShortestQueue | None:
        """The least queue of all known replicas; None if there is none."""
        with self._lock:
            if not self._replicas:
                return None
            candidates = self._candidates(sorted(self._replicas))
        return ShortestQueue(float(wait_s(candidates).min()), int(candidates["waiting_tokens"].min()))

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
                self._stale.add(booked.booking.replica_id)

    def release(self, request_id: str) -> None:
        """Drops the request's booking, however the request ended."""
        with self._lock:
            self._release(request_id)

    def snapshot(self) -> list[ReplicaView]:
        """All replicas, sorted by id."""
        with self._lock:
            return [self._view(self._replicas[replica_id]) for replica_id in sorted(self._replicas)]

    @staticmethod
    def _view(replica: KnownReplica) -> ReplicaView:
        seen = replica.candidate()
        return ReplicaView(
            replica.replica_id,
            load=replica.load,
            waiting_tokens=int(seen.waiting_tokens),
            context_tokens=int(seen.context_tokens),
            mirror_tokens=None if replica.mirror is None else replica.mirror.num_tokens,
            bookings=replica.num_bookings,
        )

    def _candidates(self, names: Sequence[str]) -> np.ndarray:
        """The replicas of these names as placement sees them, without what depends on the prompt."""
        for replica_id in self._stale:
            row, replica = self._rows[replica_id], self._replicas[replica_id]
            self._table[row] = _row(replica.candidate())
            self._heard[row] = replica.pace.seconds, replica.pace.heard_s
        self._stale.clear()
        candidates = self._table.copy()
        seconds, heard_s = self._heard.T
        left = pace_left(seconds, np.maximum(0.0, self._clock() - heard_s))
        candidates["requests_s"] *= left
        candidates["tokens_s"] *= left
        if len(names) == len(self._rows):  # rows are in the order of the names
            return candidates
        return candidates[[self._rows[name] for name in names]]

    def _cached(
        self, names: Sequence[str], prompt: bytes, hashes: Sequence[int], ends: Sequence[int], home: Home | None
    ) -> np.ndarray:
        """Tokens of the prompt that each replica has cached or will have soon, float64 [replicas]."""
        now_s, cached = self._clock(), np.empty(len(names))
        for index, replica_id in enumerate(names):
            replica = self._replicas[replica_id]
            known = 0 if replica.mirror is None else replica.mirror.match_packed(prompt)
            if home is not None and replica_id == home.replica_id:
                known = max(known, home.num_tokens)
            marked = bisect_right(ends, known)
            found = replica.expected.match(hashes, now_s, marked)
            cached[index] = known if found == marked else ends[found - 1]
        # The last token is always computed: its logits give the answer's first token.
        return np.minimum(cached, max(0, len(prompt) // np.dtype(np.int32).itemsize - 1))

    def _book(self, request_id: str, replica_id: str, prompt_tokens: int, cached_tokens: int) -> Booked:
        replica = self._replicas[replica_id]
        replica.last_number += 1
        replica.num_bookings += 1
        booked = Booked(Booking(request_id, replica_id, replica.last_number, cached_tokens), prompt_tokens)
        self._booked[request_id] = booked
        replica.unseen[request_id] = booked
        self._stale.add(replica_id)
        return booked

    def _release(self, request_id: str) -> None:
        booked = self._booked.pop(request_id, None)
        if booked is not None:
            replica = self._replicas[booked.booking.replica_id]
            replica.num_bookings -= 1
            replica.unseen.pop(request_id, None)
            self._stale.add(replica.replica_id)

    def _forget(self, replica_id: str) -> None:
        if self._replicas.pop(replica_id, None) is not None:
            gone = [name for name, booked in self._booked.items() if booked.booking.replica_id == replica_id]
            for request_id in gone:
                del self._booked[request_id]

    def _make_table(self) -> None:
        names = sorted(self._replicas)
        self._table = np.zeros(len(names), dtype=CANDIDATE)
        self._heard = np.zeros((len(names), 2))
        self._rows = {name: row for row, name in enumerate(names)}
        self._stale = set(names)
