"""A router's view of its replicas, and the atomic operation that chooses a replica for a request and books the load
there.

The fleet keeps one exact index of what all replicas have cached, updated by their cache events. For each replica it
keeps the load that it published last, and this router's own bookings. A published load counts all bookings that the
replica had received by then (`ReplicaLoad.bookings_seen`), from every router. Younger bookings are "unseen", and the
fleet adds them to the load. So each request is counted at once and only once, and each router sees the requests of the
others. Routers tell each other their bookings (`on_booking`, `hear`), which count in the same way.

    place ──▶ unseen: its uncached tokens count as waiting ──first_token──▶ its prompt counts as context
                 └── a ReplicaLoad with `bookings_seen` >= its number: the replica counts it ──▶ release
"""

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from radix.index import PrefixIndex
from radix.node import TOKEN_BYTES, pack
from router.fleet.demand import Demand, busy_parts
from router.fleet.known_replica import PEER_EXPIRES_S, Booked, Booking, KnownReplica, PeerBooking, pace_left
from router.fleet.optimistic_prefixes import OptimisticPrefixes, marks, prefix_hashes
from router.fleet.placement import CANDIDATE, Candidates, Placement, Weights, least_load, rank, round_robin
from router.fleet.popularity import Popularity
from router.fleet.queue_wait import ShortestQueue, wait_s
from router.fleet.resume_pace import SHARE
from router.programs import Home
from router.wire.errors import NoReplica
from worker.messages import CacheEvents, LengthSample, ReplicaLoad

log = logging.getLogger(__name__)

PLACEMENTS: dict[str, Placement] = {"cache_aware": rank, "least_load": least_load, "round_robin": round_robin}
WEIGHTS = Weights()
# While other routers place requests, too. Tuned by `shoal bench fleet` on zipf at 80% of 64 replicas' capacity with 32
# routers and steps of 200 ms: 99th percentile of TTFT 1.31 times that of one router without, 1.05 with (seeds 0, 1).
SHARED_WEIGHTS = Weights(spread=0.2)
# Newest outputs that a replica which comes may learn lengths from: about 256 kB. Twice the outputs that it needs before
# it predicts any would do.
LENGTH_SAMPLES = 256
# Nodes of caches that are gone, taken out of the index with each message of a replica: less than 0.1 ms.
TIDIED_NODES = 64
_row = attrgetter(*(CANDIDATE.names or ()))


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica for people, as placement sees it.

    | field | meaning |
    | --- | --- |
    | `load` | the load that it published last; None if none yet |
    | `waiting_tokens`, `context_tokens` | the same fields of `load`, plus unseen bookings: placement uses these |
    | `indexed_tokens` | tokens in its cache, as far as is known; None while the router waits for a snapshot |
    | `bookings` | this router's requests there |
    | `queue_s` | predicted seconds until a prompt that comes now would begin |
    """

    replica_id: str
    load: ReplicaLoad | None
    waiting_tokens: int
    context_tokens: int
    indexed_tokens: int | None
    bookings: int
    queue_s: float


class Fleet:
    """All replicas of one router. Every method may be called from any thread. Unknown replicas and requests without a
    booking are ignored, because messages cross on their way."""

    def __init__(
        self,
        placement: Literal["cache_aware", "least_load", "round_robin"] = "cache_aware",
        clock: Callable[[], float] = time.monotonic,
        turn: int | None = None,
        name: str = "",
    ) -> None:
        """`clock` returns seconds. `turn`: which of several equal replicas gets the first request. The default is
        random: routers that all began with the same replica would crowd it. `name`: of this router, for the others."""
        self.name = name
        self.on_booking: Callable[[PeerBooking], None] | None = None
        self.on_decision: Callable[[float], None] | None = None  # is told how many seconds each has taken
        self._shared_until_s = -math.inf  # for how long other routers count as placing requests
        self._rank = PLACEMENTS[placement]
        self._clock = clock
        self._lock = threading.Lock()
        self._replicas: dict[str, KnownReplica] = {}
        # A row for each replica, without what depends on the prompt. `_stale` are those that have changed since.
        self._table = np.zeros(0, dtype=CANDIDATE)
        self._heard = np.zeros((0, 2))  # of each row, `ArrivalPace.seconds` and `ArrivalPace.heard_s`
        self._names: list[str] = []  # of the rows, ascending
        self._rows: dict[str, int] = {}
        self._all_rows = np.zeros(0, dtype=np.intp)
        self._slots = np.zeros(0, dtype=np.intp)  # of each row, `KnownReplica.slot`
        self._num_slots = 0
        self._indexes: dict[int, PrefixIndex] = {}  # by page size: one, unless replicas differ
        # For each index, the slot of each row in it; None after a change. Rows without a cache there have slot -1.
        self._cache_slots: list[tuple[PrefixIndex, NDArray[np.intp]]] | None = None
        self._optimistic = OptimisticPrefixes()
        self._stale: set[str] = set()
        self._booked: dict[str, Booked] = {}
        self._popularity = Popularity()
        self._length_samples: deque[LengthSample] = deque(maxlen=LENGTH_SAMPLES)
        self._turn = random.getrandbits(32) if turn is None else turn

    def join(self, replica_id: str) -> None:
        """Registers a new connection to a replica, which counts this router's bookings from 1 again. Until its first
        snapshot and load, the replica counts as empty and idle. Everything known from an earlier connection is
        forgotten."""
        with self._lock:
            self._forget(replica_id)
            taken = {replica.slot for replica in self._replicas.values()}
            slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            self._replicas[replica_id] = KnownReplica(replica_id, slot)
            self._make_table()

    def leave(self, replica_id: str) -> None:
        """Forgets a replica that is gone: its cache, its load and all bookings on it."""
        with self._lock:
            self._forget(replica_id)
            self._make_table()

    def apply_events(self, replica_id: str, events: CacheEvents) -> bool:
        """Updates the index. Returns False exactly when the caller must send `Subscribe`: there was a gap in the
        events, or the scheduler is a new incarnation, so what was known of the cache was dropped. Events before the new
        snapshot are then ignored. While a snapshot comes in pieces, what has come counts."""
        with self._lock:
            for index in self._indexes.values():
                index.tidy(TIDIED_NODES)
            replica = self._replicas.get(replica_id)
            if replica is None:
                return True
            try:
                if events.piece == 0:
                    self._begin_snapshot(replica, events)
                if replica.cache is None:
                    return True
                if replica.expects(events):
                    replica.take_events(events)
                    return True
            except ValueError as error:
                if events.piece is not None:  # another snapshot would be the same
                    self._drop_cache(replica)
                    text = "replica %s sent an invalid snapshot of its cache: %s"
                    log.error(text, replica_id, error, extra={"replica": replica_id})
                    return True
            self._drop_cache(replica)
            text = "replica %s: a gap in its cache events; asking for a snapshot"
            log.warning(text, replica_id, extra={"replica": replica_id})
            return False

    def apply_load(self, replica_id: str, load: ReplicaLoad) -> None:
        """Stores the load that the replica has published."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is not None:
                now_s = self._clock()
                replica.take_load(load, now_s)
                self._optimistic.expire(now_s)  # a burst that has expired is no later placement's to drop
                self._stale.add(replica_id)
                if load.length_sample is not None:
                    self._length_samples.append(load.length_sample)

    def length_samples(self) -> list[LengthSample]:
        """The newest outputs that replicas have told, for one that may have learned nothing yet."""
        with self._lock:
            return list(self._length_samples)

    def place(
        self,
        request_id: str,
        prompt_ids: Sequence[int] | np.ndarray,
        candidates: Iterable[str],
        home: Home | None = None,
        output_limit: int | None = None,
    ) -> Booking:
        """Chooses one of `candidates` (replica ids) for the prompt and books the request there, atomically. `home`: the
        replica that counts as having all tokens of the request's branch in its cache. `output_limit`: the most output
        tokens that the request may still have; None: not known.

        Replaces an earlier booking of the same request. Raises NoReplica, with nothing booked, if no candidate is
        known, and ValueError for invalid token ids.
        """
        begun = time.perf_counter()
        prompt, num_tokens = pack(prompt_ids), len(prompt_ids)
        hashes, ends = prefix_hashes(np.frombuffer(prompt, dtype=np.int32)), marks(num_tokens)
        with self._lock:
            self._release(request_id)
            rows = self._rows_of(candidates)
            if not len(rows):
                raise NoReplica()
            choices, cached = self._candidates(), self._cached(prompt, hashes, ends, home)
            if len(rows) < len(choices):
                choices, cached = choices[rows], cached[rows]
            choices["cached_tokens"] = cached
            if output_limit is not None:
                choices["output_limit"] = output_limit
            choices["wanted_tokens"] = self._popularity.wanted_tokens(hashes, ends, cached)
            self._popularity.add(hashes, len(rows))
            is_shared = self._clock() < self._shared_until_s
            best = int(self._rank(choices, num_tokens, SHARED_WEIGHTS if is_shared else WEIGHTS, self._turn)[0])
            self._turn += 1
            replica = self._replicas[self._names[rows[best]]]
            booked = self._book(request_id, replica, num_tokens, int(cached[best]))
            self._optimistic.add(replica.slot, hashes, self._clock())
        booking = booked.booking
        if self.on_decision is not None:
            self.on_decision(time.perf_counter() - begun)
        if self.on_booking is not None:
            self.on_booking(
                PeerBooking(
                    self.name,
                    booking.replica_id,
                    booking.number,
                    num_tokens,
                    booking.cached_tokens,
                    list(hashes),
                )
            )
        return booking

    def hear(self, peer: PeerBooking) -> None:
        """Counts a booking of another router, until the replica counts it."""
        with self._lock:
            replica = self._replicas.get(peer.replica_id)
            if replica is None:
                return
            now_s = self._clock()
            self._shared_until_s = now_s + PEER_EXPIRES_S
            if replica.load is None or peer.number > replica.load.peers_seen.get(peer.router, 0):
                replica.peers.add(peer, now_s)
                self._stale.add(peer.replica_id)
            self._popularity.add(peer.hashes, len(self._replicas))
            self._optimistic.add(replica.slot, peer.hashes, now_s)

    def shortest_queue(self, exclude: Collection[str] = ()) -> ShortestQueue | None:
        """The least queue of all known replicas, without those of `exclude`; None if there is none."""
        with self._lock:
            rows = self._rows_of(self._rows.keys() - exclude)
            if not len(rows):
                return None
            candidates = self._candidates()[rows]
        return ShortestQueue(float(wait_s(candidates).min()), int(candidates["waiting_tokens"].min()))

    def demand(self, exclude: Collection[str], ready: int, waiting: int) -> Demand:
        """The work that requests bring to all known replicas, without those of `exclude`. `ready`, `waiting`: as
        `Demand` has them."""
        with self._lock:
            rows = self._rows_of(self._rows.keys() - exclude)
            candidates = self._candidates()[rows]
            is_idle = not (waiting or self._booked or (candidates["running"] + candidates["waiting"]).any())
        queue_s = float(wait_s(candidates).min()) if len(rows) else 0.0
        return Demand(waiting, ready, queue_s, float(busy_parts(candidates).sum()), is_idle)

    def prompt_s(self, prompt_ids: Sequence[int], exclude: Collection[str] = ()) -> float:
        """Seconds that a prompt takes the replica that is quickest with it, by what each has cached, without those of
        `exclude`; 0 if there is none."""
        prompt, num_tokens = pack(prompt_ids), len(prompt_ids)
        hashes, ends = prefix_hashes(np.frombuffer(prompt, dtype=np.int32)), marks(num_tokens)
        with self._lock:
            rows = self._rows_of(self._rows.keys() - exclude)
            if not len(rows):
                return 0.0
            cached, c = self._cached(prompt, hashes, ends, None)[rows], self._candidates()[rows]
        products = (num_tokens**2 - cached**2) / 2
        return float(((num_tokens - cached) * c["token_s"] + products * c["product_s"]).min())

    def resume_rate(self, exclude: Collection[str] = ()) -> float:
        """Predicted seconds of resumed prompts that all known replicas may take on in a second, without those of
        `exclude`: each `SHARE` of its time, or all of it while nothing runs there."""
        with self._lock:
            rows = self._rows_of(self._rows.keys() - exclude)
            running = self._candidates()["running"][rows]
        return float(np.where(running > 0, SHARE, 1.0).sum())

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
            candidates = self._candidates()
            queues = wait_s(candidates)
            return [self._view(row, candidates, float(queues[row])) for row in range(len(candidates))]

    def _view(self, row: int, candidates: Candidates, queue_s: float) -> ReplicaView:
        replica = self._replicas[self._names[row]]
        return ReplicaView(
            replica.replica_id,
            load=replica.load,
            waiting_tokens=int(candidates["waiting_tokens"][row]),
            context_tokens=int(candidates["context_tokens"][row]),
            indexed_tokens=None if replica.cache is None else replica.cache.num_tokens,
            bookings=replica.num_bookings,
            queue_s=queue_s,
        )

    def _rows_of(self, candidates: Iterable[str]) -> NDArray[np.intp]:
        """The rows of those candidates that are known, ascending."""
        known = self._rows.keys() & candidates
        if len(known) == len(self._rows):
            return self._all_rows
        return np.array(sorted(self._rows[name] for name in known), dtype=np.intp)

    def _candidates(self) -> Candidates:
        """All replicas as placement sees them, without what depends on the prompt."""
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
        return candidates

    def _cached(
        self, prompt: bytes, hashes: Sequence[int], ends: Sequence[int], home: Home | None
    ) -> NDArray[np.float64]:
        """Tokens of the prompt that each replica has cached or will have soon, [rows]."""
        marked = self._optimistic.match(hashes, self._clock(), self._num_slots)[self._slots]
        cached = np.array([0.0, *ends])[marked]
        goes_on_anywhere = True
        for index, slots in self._known_caches():
            cached = np.maximum(cached, index.match(prompt)[slots])
            goes_on_anywhere &= not index.has_checkpoints
        if home is not None and goes_on_anywhere and (row := self._rows.get(home.replica_id)) is not None:
            cached[row] = max(cached[row], home.num_tokens)
        # The last token is always computed: its logits give the answer's first token.
        return np.minimum(cached, max(0, len(prompt) // TOKEN_BYTES - 1))

    def _known_caches(self) -> list[tuple[PrefixIndex, NDArray[np.intp]]]:
        if self._cache_slots is None:
            caches = [self._replicas[name].cache for name in self._names]
            self._cache_slots = [
                (index, np.array([-1 if c is None or c.index is not index else c.slot for c in caches], dtype=np.intp))
                for index in self._indexes.values()
            ]
        return self._cache_slots

    def _begin_snapshot(self, replica: KnownReplica, events: CacheEvents) -> None:
        """Gives a replica a new, empty cache in the index. Raises ValueError for a page size that cannot be."""
        self._drop_cache(replica)
        if events.page_size not in self._indexes:
            self._indexes[events.page_size] = PrefixIndex(events.page_size)
        replica.cache = self._indexes[events.page_size].add()
        replica.incarnation, replica.next_piece = events.incarnation, 0
        self._cache_slots = None

    def _drop_cache(self, replica: KnownReplica) -> None:
        if replica.cache is not None:
            replica.cache.index.drop(replica.cache)
            replica.cache = self._cache_slots = None

    def _book(self, request_id: str, replica: KnownReplica, prompt_tokens: int, cached_tokens: int) -> Booked:
        replica.last_number += 1
        replica.num_bookings += 1
        booking = Booking(request_id, replica.replica_id, replica.last_number, cached_tokens)
        booked = Booked(booking, prompt_tokens)
        self._booked[request_id] = booked
        replica.unseen[request_id] = booked
        self._stale.add(replica.replica_id)
        return booked

    def _release(self, request_id: str) -> None:
        booked = self._booked.pop(request_id, None)
        if booked is not None:
            replica = self._replicas[booked.booking.replica_id]
            replica.num_bookings -= 1
            replica.unseen.pop(request_id, None)
            self._stale.add(replica.replica_id)

    def _forget(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            gone = [name for name, booked in self._booked.items() if booked.booking.replica_id == replica_id]
            for request_id in gone:
                del self._booked[request_id]
            self._drop_cache(replica)
            self._optimistic.forget(replica.slot)

    def _make_table(self) -> None:
        self._names = sorted(self._replicas)
        self._table = np.zeros(len(self._names), dtype=CANDIDATE)
        self._heard = np.zeros((len(self._names), 2))
        self._rows = {name: row for row, name in enumerate(self._names)}
        self._all_rows = np.arange(len(self._names))
        self._slots = np.array([self._replicas[name].slot for name in self._names], dtype=np.intp)
        self._num_slots = 1 + max((replica.slot for replica in self._replicas.values()), default=-1)
        self._cache_slots = None
        self._stale = set(self._names)
