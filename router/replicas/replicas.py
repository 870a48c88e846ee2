"""The replicas that this router knows: one connection to each (`router/replicas/connection.py`).

When a connection is lost, a new one with a new identity is tried, until the replica is dropped. The replica knows a
router by its identity, and aborts the requests of the old one.

A replica that is taken away gets no new requests. Its connection stays while it has streams, until the replica ends or
`drain_s` is over; then its streams raise `ReplicaLost`, and go on elsewhere.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping

import zmq.asyncio

from router.fleet.fleet import Fleet
from router.metrics.metrics import ModelMetrics
from router.replicas.connection import LOOK_EVERY_S, ReplicaConnection
from router.replicas.peers import Peers
from router.replicas.stream import ReplicaLost, ReplicaStream
from worker.curve import REPLICA, Curve
from worker.messages import AdapterChange, Flush, FromRouter, Generate, ReplicaLoad, UsageReport

log = logging.getLogger(__name__)

# How much longer a router keeps the streams of a leaving replica than the replica itself, which says when it ends.
LATER_S = 5.0


class Replicas:
    """The connections to all replicas. Only `set_replicas` may be called outside of the event loop that called
    `start`. `on_usage`: called with the reports of other routers."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: ModelMetrics,
        secret: bytes,
        peer_host: str | None = None,
        drain_s: float | None = None,
    ) -> None:
        """`secret`: that of the replicas and of the other routers (`worker.curve`). `peer_host`: an address of this
        machine at which other routers of the same replicas can hear of bookings. None: there are no others. `drain_s`:
        how long, in seconds, a replica that is taken away may keep its streams. None: they go on elsewhere at once."""
        self._fleet = fleet
        self._peers = None if peer_host is None else Peers(fleet, peer_host, metrics.reuse, secret)
        self._metrics = metrics
        self._curve = Curve(secret, REPLICA)
        self._addresses: dict[str, str] = {}
        self._connections: dict[str, ReplicaConnection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # each is named after the replica's address
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._drain_s = drain_s
        self._leaving: dict[str, asyncio.Task[None]] = {}  # those that were dropped and have streams: their last wait
        self._looking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.asyncio.Context | None = None
        self._changed = asyncio.Event()
        self._large = asyncio.Lock()
        self.on_usage: Callable[[UsageReport], None] = lambda report: None
        self.on_adapters: Callable[[AdapterChange], None] = lambda change: None

    def set_replicas(self, addresses: Mapping[str, str]) -> None:
        """Sets the replicas: id to ZeroMQ address. Connects new ones. Takes away those that are missing now, and drops
        those that have another address, with their streams. Thread-safe; may be called before `start`."""
        self._addresses = dict(addresses)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing to keep up to date
                self._loop.call_soon_threadsafe(self._reconcile)

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._loop = asyncio.get_running_loop()
        if self._peers is not None:
            self._peers.start(self._context)
        self._looking = self._loop.create_task(self._look_often())
        self._reconcile()

    async def close(self) -> None:
        self._loop = None
        tasks = [*self._tasks.values(), *self._leaving.values(), *self._ending.values()]
        if self._looking is not None:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        if self._peers is not None:
            await self._peers.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    @property
    def ready(self) -> frozenset[str]:
        """Ids of the replicas that can answer: connected, their first load has come, and they are neither silent nor
        being taken away."""
        return self._metrics.ready

    @property
    def closed(self) -> frozenset[str]:
        """Ids of connected replicas that get no new requests: they are silent, or being taken away."""
        return self._metrics.closed

    @property
    def num_routers(self) -> int:
        """Routers that place requests on these replicas, as far as is known, with this one."""
        return 1 if self._peers is None else 1 + self._peers.others

    @property
    def known(self) -> frozenset[str]:
        """Ids of all replicas of `set_replicas`, connected or not."""
        return frozenset(self._addresses)

    async def changed(self) -> None:
        """Returns after the next change of `ready`."""
        await self._changed.wait()

    def generate(self, replica_id: str, request: Generate) -> ReplicaStream:
        """Sends the request at once. Raises ReplicaLost if the replica is not connected. The stream raises ReplicaLost
        when the connection breaks, and ReaderTooSlow when its outputs are not read."""
        connection = self._connections.get(replica_id)
        if connection is None or not connection.connected:
            raise ReplicaLost(replica_id)
        if request.adapter is not None and not connection.knows_adapters:
            raise ReplicaLost(replica_id)  # it would answer with the base model
        return connection.generate(request)

    def tell_all(self, message: FromRouter) -> None:
        """Sends a message to all connected replicas."""
        for connection in self._connections.values():
            if connection.connected:
                connection.send(message)

    async def flush(self, within_s: float) -> tuple[dict[str, ReplicaLoad], set[str]]:
        """Empties the caches of prefixes of all connected replicas. Returns the loads of those that have done so, by
        id, and the ids of those that have not within `within_s` seconds."""
        flush = Flush(secrets.token_hex(8))
        asked = {name: link.flush(flush) for name, link in self._connections.items() if link.connected}
        if asked:
            await asyncio.wait(asked.values(), timeout=within_s)
        done = {name: task.result() for name, task in asked.items() if task.done() and not task.cancelled()}
        return {name: load for name, load in done.items() if load is not None}, {
            name for name in asked if done.get(name) is None
        }

    def tell_adapters(self, change: AdapterChange) -> None:
        """Tells all other routers of adapters that were loaded or unloaded here."""
        for connection in self._connections.values():
            if connection.connected and connection.knows_adapters:
                connection.send(change)

    def tell_one(self, message: FromRouter, turn: int) -> None:
        """Sends a message to one of the ready replicas, of which there must be one, by `turn`."""
        ready = sorted(self.ready)
        self._connections[ready[turn % len(ready)]].send(message)

    def look(self) -> None:
        """Takes out the replicas that are silent. Called every `LOOK_EVERY_S`."""
        for connection in list(self._connections.values()):
            connection.look(self._notify)

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _reconcile(self) -> None:
        if self._loop is None:
            return
        self._leaving = {name: task for name, task in self._leaving.items() if not task.done()}
        for replica_id, task in list(self._tasks.items()):
            address = self._addresses.get(replica_id)
            if address == task.get_name():
                if (wait := self._leaving.pop(replica_id, None)) is not None:  # it stays after all
                    wait.cancel()
                    self._metrics.leaving.discard(replica_id)
                    self._notify()
                continue
            connection = self._connections.get(replica_id)
            is_used = connection is not None and bool(connection.streams)
            if address is not None or self._drain_s is None or not is_used:
                self._drop(replica_id)
            elif replica_id not in self._leaving:
                assert connection is not None
                self._leaving[replica_id] = self._loop.create_task(self._let_go(connection, self._drain_s))
        self._ending = {name: task for name, task in self._ending.items() if not task.done()}
        for replica_id, address in self._addresses.items():
            if replica_id not in self._tasks:
                self._tasks[replica_id] = self._loop.create_task(self._keep(replica_id, address), name=address)

    async def _let_go(self, connection: ReplicaConnection, within_s: float) -> None:
        """Drops a replica that is being taken away once it has no streams, at the latest after `within_s` seconds."""
        connection.leave(self._notify)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(connection.unused(), within_s + LATER_S)
        del self._leaving[connection.replica_id]
        self._drop(connection.replica_id)

    def _drop(self, replica_id: str) -> None:
        if (wait := self._leaving.pop(replica_id, None)) is not None:
            wait.cancel()
        task = self._tasks.pop(replica_id)
        task.cancel()
        self._ending[replica_id] = task
        self._metrics.forget(replica_id)

    async def _keep(self, replica_id: str, address: str) -> None:
        """Keeps a connection to the replica: opens one after another, until the replica is dropped."""
        assert self._context is not None
        previous = self._ending.get(replica_id)
        if previous is not None:  # it must have left the fleet before this one joins
            await asyncio.wait([previous])
        while True:
            connection = ReplicaConnection(
                replica_id,
                address,
                self._context,
                self._fleet,
                self._metrics,
                self._peers,
                self._large,
                self._curve,
                lambda report: self.on_usage(report),
                lambda change: self.on_adapters(change),
            )
            self._connections[replica_id] = connection
            try:
                again_s = await connection.run(self._notify)
            finally:
                if self._connections.get(replica_id) is connection:
                    del self._connections[replica_id]
            if again_s is None:
                return
            log.warning("lost replica %s at %s", replica_id, address, extra={"replica": replica_id})
            await asyncio.sleep(again_s)
