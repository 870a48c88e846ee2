"""A router's knowledge of one replica: its cache, its load, its pace, and this router's own bookings there."""

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from radix.index import IndexedCache
from router.fleet.placement import Candidate
from worker.messages import CacheEvents, ReplicaLoad

log = logging.getLogger(__name__)

PEER_EXPIRES_S = 5.0  # longer than a step: a replica tells what has arrived when its step ends
PACE_S = 5.0  # time constant of `ArrivalPace`
# A replica's mean output before its first one: the length, and the number of outputs that it counts as.
FIRST_OUTPUT_TOKENS, FIRST_OUTPUTS = 200, 8
NO_LOAD = ReplicaLoad(incarnation="")


@dataclass(frozen=True, slots=True)
class Booking:
    """The replica that a request was placed on. `number` goes into `Generate.booking`. `cached_tokens`: how much of the
    prompt was expected to be cached there."""

    request_id: str
    replica_id: str
    number: int
    cached_tokens: int


@dataclass(slots=True)
class Booked:
    """A booking with what the router knows of the request."""

    booking: Booking
    prompt_tokens: int
    has_first_token: bool = False


class ArrivalPace:
    """Requests and uncached prompt tokens that come to a replica in a second, from all routers: averages that forget
    with a time constant of `PACE_S`. `heard_s`: when the last load came. `seconds`: of lately, older ones counting
    less."""

    __slots__ = ("_load", "_requests", "_tokens", "heard_s", "seconds")

    def __init__(self) -> None:
        self._requests = self._tokens = self.seconds = self.heard_s = 0.0
        self._load: ReplicaLoad | None = None

    @property
    def requests_s(self) -> float:
        return self._requests / self.seconds if self.seconds else 0.0

    @property
    def tokens_s(self) -> float:
        return self._tokens / self.seconds if self.seconds else 0.0

    def follow(self, load: ReplicaLoad, now_s: float) -> None:
        """Learns from the counters of a load that has come at `now_s` (seconds)."""
        old, passed_s = self._load, now_s - self.heard_s
        if old is not None and old.incarnation == load.incarnation:
            left = math.exp(-passed_s / PACE_S)
            self._requests = left * self._requests + max(0, _requests(load) - _requests(old))
            self._tokens = left * self._tokens + max(0, _computed(load) - _computed(old))
            self.seconds = left * self.seconds + passed_s
        self._load, self.heard_s = load, now_s


def pace_left(seconds: NDArray[np.float64], silent_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The part of each replica's pace that is left after `silent_s` seconds without a load: an idle replica tells
    none."""
    left = seconds * np.exp(silent_s / -PACE_S)
    return left / np.maximum(1e-9, left + silent_s)


class PeerBooking(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A booking, as a router tells it to all others.

    | field | meaning |
    | --- | --- |
    | `router`, `number` | name of the router, and number of the booking among its own at that replica |
    | `hashes` | the prompt's `prefix_hashes`: its prefixes will soon be cached there |
    """

    router: str
    replica_id: str
    number: int
    prompt_tokens: int
    cached_tokens: int
    hashes: list[int]


class PeerBookings:
    """Bookings of other routers that a replica's load does not count yet.

    A replica counts a booking when the request arrives. A request may never arrive, if its router ends just then: so a
    booking counts for `PEER_EXPIRES_S` at most.
    """

    __slots__ = ("_by_router",)

    def __init__(self) -> None:
        self._by_router: dict[str, deque[tuple[float, PeerBooking]]] = {}

    def __iter__(self) -> Iterator[PeerBooking]:
        return (booking for bookings in self._by_router.values() for _, booking in bookings)

    def add(self, booking: PeerBooking, now_s: float) -> None:
        """Counts a booking that was made at `now_s` (seconds)."""
        self._by_router.setdefault(booking.router, deque()).append((now_s + PEER_EXPIRES_S, booking))

    def drop(self, seen: Mapping[str, int], now_s: float) -> None:
        """Drops the bookings that the replica counts (`ReplicaLoad.peers_seen`), and old ones."""
        for router, bookings in list(self._by_router.items()):
            counted = seen.get(router, 0)
            while bookings and (bookings[0][0] <= now_s or bookings[0][1].number <= counted):
                bookings.popleft()
            if not bookings:
                del self._by_router[router]


@dataclass(slots=True)
class KnownReplica:
    """A replica with all that the router knows of it.

    | field | meaning |
    | --- | --- |
    | `slot` | its bit in the router's `OptimisticPrefixes` |
    | `cache` | its cache in the router's index; None from a gap in the events (or the start) to the next snapshot |
    | `next_piece` | the piece of a snapshot that is to come next; None if the snapshot is complete |
    | `unseen` | the bookings that `load` does not count yet, in order of their numbers |
    | `peers` | those of other routers |
    """

    replica_id: str
    slot: int
    cache: IndexedCache | None = None
    next_piece: int | None = None
    incarnation: str = ""
    next_seq: int = 0
    load: ReplicaLoad | None = None
    last_number: int = 0
    num_bookings: int = 0
    unseen: dict[str, Booked] = field(default_factory=dict)
    peers: PeerBookings = field(default_factory=PeerBookings)
    pace: ArrivalPace = field(default_factory=ArrivalPace)

    def candidate(self) -> Candidate:
        """The replica as placement sees it, without what it has of a prompt."""
        load, costs = self.load or NO_LOAD, (self.load or NO_LOAD).costs
        waiting_tokens, waiting_products, context_tokens = (
            load.waiting_tokens,
            load.waiting_products,
            load.context_tokens,
        )
        outputs = FIRST_OUTPUT_TOKENS * FIRST_OUTPUTS + load.output_tokens
        decoding = 0
        for booked in self.unseen.values():
            prompt, cached = booked.prompt_tokens, booked.booking.cached_tokens
            if booked.has_first_token:
                decoding += 1
                context_tokens += prompt
            else:
                waiting_tokens += prompt - cached
                waiting_products += (prompt - cached) * (prompt + cached) // 2
        waiting = load.waiting + len(self.unseen) - decoding
        for peer in self.peers:
            waiting += 1
            prompt, cached = peer.prompt_tokens, peer.cached_tokens
            waiting_tokens += prompt - cached
            waiting_products += (prompt - cached) * (prompt + cached) // 2
        return Candidate(
            waiting_tokens=waiting_tokens,
            waiting_products=waiting_products,
            context_tokens=context_tokens,
            running=load.running + decoding,
            waiting=waiting,
            kv_tokens=load.kv_tokens_total,
            output_tokens=outputs / (FIRST_OUTPUTS + load.finished),
            requests_s=self.pace.requests_s,
            tokens_s=self.pace.tokens_s,
            step_s=costs.step_s,
            token_s=costs.token_s,
            product_s=costs.product_s,
            decode_s=costs.decode_s,
            context_s=costs.context_s,
            full_s=costs.full_s,
        )

    def take_load(self, load: ReplicaLoad, now_s: float) -> None:
        """Stores the load that has come at `now_s`, and drops the bookings that it counts from `unseen`."""
        self.pace.follow(load, now_s)
        self.load = load
        self.peers.drop(load.peers_seen, now_s)
        while self.unseen:
            request_id, first = next(iter(self.unseen.items()))
            if first.booking.number > load.bookings_seen:
                break
            del self.unseen[request_id]

    def expects(self, events: CacheEvents) -> bool:
        """Whether these events follow the last ones. There must be a cache."""
        assert self.cache is not None
        if (events.incarnation, events.page_size) != (self.incarnation, self.cache.index.page_size):
            return False
        if self.next_piece is not None:
            return events.piece == self.next_piece
        return events.piece is None and events.first_seq == self.next_seq

    def take_events(self, events: CacheEvents) -> None:
        """Applies the next events to the cache. Raises ValueError if one does not fit those before it; the cache must
        be dropped then."""
        assert self.cache is not None
        for event in events.changes():
            self.cache.apply(event)
        if events.piece is None:
            self.next_seq += len(events.events)
        elif events.complete:
            self.next_piece, self.next_seq = None, events.first_seq
        else:
            self.next_piece = events.piece + 1


def _requests(load: ReplicaLoad) -> int:
    """Requests that have come since the replica's start."""
    return load.finished + load.failed + load.aborts + load.running + load.waiting


def _computed(load: ReplicaLoad) -> int:
    """Uncached prompt tokens of the requests that have begun since the replica's start."""
    return load.prompt_tokens - load.cached_tokens
