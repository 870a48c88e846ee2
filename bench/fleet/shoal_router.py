"""The project's router as a placement rule of the simulation: the real `Fleet`."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from bench.fleet.simulation import Placed
from bench.fleet.workloads import FleetRequest
from router.fleet.fleet import Fleet
from router.fleet.known_replica import PeerBooking
from worker.messages import CacheEvents, ReplicaLoad


class ShoalRule:
    """A router. `placement`: as the setting of that name."""

    def __init__(
        self,
        num_replicas: int,
        placement: Literal["cache_aware", "least_load", "round_robin"] = "cache_aware",
        page_size: int = 16,
        seed: int = 0,
        name: str = "0",
        tells_peers: bool = True,
    ) -> None:
        """`name`: as the simulation numbers the routers. `tells_peers`: whether the others hear of bookings at once."""
        self._now_s = 0.0
        self.fleet = Fleet(placement, lambda: self._now_s, turn=seed, name=name)
        self._news: list[PeerBooking] = []
        if tells_peers:
            self.fleet.on_booking = self._news.append
        self._names = [f"{index:03d}" for index in range(num_replicas)]
        for name in self._names:
            self.fleet.join(name)
            self.fleet.apply_events(name, CacheEvents("", 0, [], page_size, piece=0))
        self._there = set(self._names)

    def place(self, request: FleetRequest, tokens: np.ndarray, now_s: float) -> Placed:
        self._now_s = now_s
        booking = self.fleet.place(str(request.number), tokens, self._there)
        return Placed(int(booking.replica_id), booking.number)

    def news(self) -> Sequence[PeerBooking]:
        told, self._news[:] = list(self._news), []
        return told

    def hear(self, news: Sequence[PeerBooking], now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        for booking in news:
            self.fleet.hear(booking)

    def apply_events(self, replica: int, events: CacheEvents) -> None:
        if not self.fleet.apply_events(self._names[replica], events):
            raise AssertionError("no events are lost here")

    def apply_load(self, replica: int, load: ReplicaLoad) -> None:
        self.fleet.apply_load(self._names[replica], load)

    def leave(self, replica: int) -> None:
        """A replica is gone."""
        self._there.remove(self._names[replica])
        self.fleet.leave(self._names[replica])

    def first_token(self, request: FleetRequest) -> None:
        self.fleet.first_token(str(request.number))

    def ended(self, request: FleetRequest) -> None:
        self.fleet.release(str(request.number))
