"""The replicas that this router knows: one ZeroMQ connection to each, and the streams that run over it.

A lost connection is noticed at once: TCP reports it, or ZeroMQ's heartbeats do when a machine vanishes. The replica's
I/O thread answers heartbeats, so a long step does not look like death.

A replica speaks every `BEAT_S`, also in the middle of a step. One that is connected and silent for `SILENT_S` is not
`ready` until it is heard again, so it gets no new requests. Its streams stay: only its process knows whether they will
go on, and ends if they will not.

When a connection is lost:

1. Every stream on it raises `ReplicaLost`.
2. The fleet forgets the replica.
3. A new connection with a new identity is tried, until the replica is dropped. The replica knows a router by its
   identity, and aborts the requests of the old one.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.fleet import Fleet
from router.metrics import ModelMetrics
from router.peers import Peers
from worker.messages import (
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    Abort,
    CacheEvents,
    Farewell,
    FromReplica,
    FromRouter,
    Generate,
    Output,
    Outputs,
    ReplicaLoad,
    Routers,
    Subscribe,
    UsageReport,
    decode_from_replica,
    encode,
)

log = logging.getLogger(__name__)

# How long a connected replica may be silent before it gets no more requests: two beats and a half. Looks are counted,
# not time, so a router that was stopped itself does not take out every replica as it goes on.
LOOK_EVERY_S = 0.25
SILENT_LOOKS = 10
SILENT_S = SILENT_LOOKS * LOOK_EVERY_S
RECONNECT_S = 0.1
RECONNECT_MAX_S = 2.0
# For a client that reads slower than the replica writes: its sequence is stopped when this many tokens are unread, and
# resumed when they are read. Meanwhile the sequence holds no pages, and no more memory than these tokens.
MAX_UNREAD_TOKENS = 2048
# Bytes of a frame that takes a turn of the event loop for itself: a piece of a snapshot, or a step's many events. A
# router that starts while many replicas run gets many of them at once.
LARGE_FRAME = 1 << 14


class ReplicaLost(Exception):
    """The replica of a stream is gone. `dropped`: it was removed by `Replicas.set_replicas`; it did not die."""

    def __init__(self, replica_id: str, dropped: bool = False) -> None:
        super().__init__(f"replica {replica_id} {'was taken away' if dropped else 'is gone'}")
        self.replica_id = replica_id
        self.dropped = dropped


class ReaderTooSlow(Exception):
    """The stream was stopped because its outputs are not read. Raised once all earlier outputs have been read."""


class ReplicaStream:
    """The outputs of one request, as an async iterator for one reader. Must be closed, finished or not.

    Waiting outputs are merged into one, so a reader that falls behind gets fewer and longer outputs.
    """

    def __init__(self, connection: "_Connection", request_id: str) -> None:
        self.request_id = request_id
        self._connection = connection
        self._outputs: deque[Output] = deque()
        self._error: Exception | None = None
        self._done = False
        self._wake: asyncio.Future[None] | None = None
        self.unread_tokens = 0

    def feed(self, output: Output) -> None:
        self._outputs.append(output)
        self.unread_tokens += len(output.token_ids)
        self._done = output.finish_reason is not None
        self._notify()

    def fail(self, error: Exception) -> None:
        """Ends the stream with `error`, which is raised to the reader after all earlier outputs."""
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def __aiter__(self) -> "ReplicaStream":
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._done:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        output = self._outputs.popleft()
        while self._outputs:
            output = _merged(output, self._outputs.popleft())
        self.unread_tokens = 0
        return output

    def close(self) -> None:
        """Ends the stream. Tells the replica to stop the request if it is still running."""
        if not self._done and self._error is None:
            self._connection.abort([self.request_id])


def _merged(first: Output, second: Output) -> Output:
    """Merges two consecutive outputs into one."""
    return msgspec.structs.replace(
        first,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
        stop_token_id=second.stop_token_id,
        failure=second.failure,
        num_drafted=first.num_drafted + second.num_drafted,
        num_accepted=first.num_accepted + second.num_accepted,
        check=second.check or first.check,
    )


class _Left(Exception):
    """The replica has said that it ends."""

    def __init__(self, farewell: Farewell) -> None:
        super().__init__(farewell.message)
        self.farewell = farewell


class _Connection:
    """A DEALER socket to one replica, from its first attempt to connect to its loss."""

    def __init__(
        self,
        replica_id: str,
        address: str,
        context: zmq.asyncio.Context,
        fleet: Fleet,
        metrics: ModelMetrics,
        peers: Peers | None,
        large: asyncio.Lock,
        on_usage: Callable[[UsageReport], None],
    ) -> None:
        """`large`: held while a large frame is handled, by one of all connections at a time."""
        self.replica_id = replica_id
        self._large = large
        self._peers = peers
        self._address = address
        self.connected = False
        self._unheard_looks = 0
        self._is_in_queue = False  # a frame of it has come and waits for its turn
        self.streams: dict[str, ReplicaStream] = {}
        self._fleet = fleet
        self._metrics = metrics
        self._on_usage = on_usage
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_S * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MAX_S * 1000))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    async def run(self, changed: Callable[[], None]) -> bool:
        """Returns when the connection is lost: True if the other side ended it, False if an error here did. Calls
        `changed` when the connection is made, ready, and lost."""
        dropped, reason = False, "lost"
        try:
            self._socket.connect(self._address)
            await self._event(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self.connected = True
            self._fleet.join(self.replica_id)
            self.send(self._subscription())
            changed()
            await self._until_lost(changed)
            return True
        except asyncio.CancelledError:
            dropped = True
            raise
        except _Left as error:
            reason = error.farewell.reason
            log.warning("replica %s at %s ends: %s", self.replica_id, self._address, error.farewell.message)
            return True
        except Exception:  # a message of another version, or our own mistake: no request may hang because of it
            log.exception("the connection to replica %s at %s failed", self.replica_id, self._address)
            reason = "error"
            return False
        finally:
            if self.connected and not dropped:
                self._metrics.taken_out(reason)
            self._close(dropped)
            changed()

    def look(self, changed: Callable[[], None]) -> None:
        """Called every `LOOK_EVERY_S`. Takes the replica out if it has been silent for `SILENT_LOOKS` looks."""
        if not self.connected or self._is_in_queue:
            return
        self._unheard_looks += 1
        if self._unheard_looks == SILENT_LOOKS:
            log.warning(
                "replica %s at %s has said nothing for %g s; it gets no requests until it is heard again",
                *(self.replica_id, self._address, SILENT_S),
            )
            self._metrics.silent.add(self.replica_id)
            self._metrics.taken_out("silent")
            changed()

    def _heard(self, changed: Callable[[], None]) -> None:
        self._unheard_looks = 0
        if self.replica_id in self._metrics.silent:
            self._metrics.silent.remove(self.replica_id)
            log.info("replica %s at %s is heard again", self.replica_id, self._address)
            changed()

    async def _until_lost(self, changed: Callable[[], None]) -> None:
        reader = asyncio.ensure_future(self._read(changed))
        watcher = asyncio.ensure_future(self._event(zmq.EVENT_DISCONNECTED))
        try:
            await asyncio.wait((reader, watcher), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            watcher.cancel()
            await asyncio.gather(reader, watcher, return_exceptions=True)

    def _close(self, dropped: bool) -> None:
        if self.connected:
            self.connected = False
            self._fleet.leave(self.replica_id)
            if self._peers is not None:
                self._peers.found(self.replica_id, {})
            self._metrics.lost(self.replica_id)
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.fail(ReplicaLost(self.replica_id, dropped))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def _event(self, wanted: int) -> None:
        while (await recv_monitor_message(self._monitor))["event"] != wanted:
            pass

    async def _read(self, changed: Callable[[], None]) -> None:
        """Handles the replica's messages. Raises msgspec.DecodeError for an invalid one: the replica runs another
        version."""
        while True:
            frame = await self._socket.recv()
            self._heard(changed)
            if len(frame) < LARGE_FRAME:
                self._handle(decode_from_replica(frame), changed)
                continue
            self._is_in_queue = True
            async with self._large:
                self._is_in_queue = False
                self._handle(decode_from_replica(frame), changed)
                await asyncio.sleep(0)

    def _handle(self, message: FromReplica, changed: Callable[[], None]) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    self._deliver(output)
            case CacheEvents():
                if not self._fleet.apply_events(self.replica_id, message):
                    self.send(self._subscription())  # there was a gap
            case ReplicaLoad():
                first = self.replica_id not in self._metrics.loads
                self._metrics.told(self.replica_id, message)
                self._fleet.apply_load(self.replica_id, message)
                if first:
                    changed()
            case UsageReport():
                self._on_usage(message)
            case Farewell():
                raise _Left(message)
            case Routers():
                if self._peers is not None:
                    self._peers.found(self.replica_id, message.addresses)

    def _subscription(self) -> Subscribe:
        return Subscribe() if self._peers is None else self._peers.subscription()

    def _deliver(self, output: Output) -> None:
        stream = self.streams.get(output.request_id)
        if stream is None:
            return  # aborted a moment ago
        stream.feed(output)
        if output.finish_reason is not None:
            del self.streams[output.request_id]
        elif stream.unread_tokens > MAX_UNREAD_TOKENS:
            self.abort([output.request_id])
            stream.fail(ReaderTooSlow())

    def send(self, message: FromRouter) -> None:
        """Sends at once. Never blocks, because the socket has no high-water mark."""
        self._socket.send(encode(message), zmq.NOBLOCK)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.streams.pop(request_id, None)
        if self.connected:
            self.send(Abort(request_ids))


class Replicas:
    """The connections to all replicas. Only `set_replicas` may be called outside of the event loop that called
    `start`. `on_usage`: called with the reports of other routers."""

    def __init__(self, fleet: Fleet, metrics: ModelMetrics, peer_host: str | None = None) -> None:
        """`peer_host`: an address of this machine at which other routers of the same replicas can hear of bookings.
        None: there are no others."""
        self._fleet = fleet
        self._peers = None if peer_host is None else Peers(fleet, peer_host, metrics.reuse)
        self._metrics = metrics
        self._addresses: dict[str, str] = {}
        self._connections: dict[str, _Connection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # each is named after the replica's address
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.asyncio.Context | None = None
        self._changed = asyncio.Event()
        self._large = asyncio.Lock()
        self.on_usage: Callable[[UsageReport], None] = lambda report: None

    def set_replicas(self, addresses: Mapping[str, str]) -> None:
        """Sets the replicas: id to ZeroMQ address. Connects new ones. Drops those that are missing now or have another
        address, with their streams. Thread-safe; may be called before `start`."""
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
        tasks = [*self._tasks.values(), *self._ending.values()]
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
        """Ids of the replicas that can answer: connected, their first load has come, and they are not silent."""
        return self._metrics.ready

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
        stream = ReplicaStream(connection, request.request_id)
        connection.streams[request.request_id] = stream
        connection.send(request)
        return stream

    def tell_all(self, message: FromRouter) -> None:
        """Sends a message to all connected replicas."""
        for connection in self._connections.values():
            if connection.connected:
                connection.send(message)

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
        for replica_id, task in list(self._tasks.items()):
            if self._addresses.get(replica_id) != task.get_name():
                task.cancel()
                self._ending[replica_id] = self._tasks.pop(replica_id)
                self._metrics.forget(replica_id)
        self._ending = {name: task for name, task in self._ending.items() if not task.done()}
        for replica_id, address in self._addresses.items():
            if replica_id not in self._tasks:
                self._tasks[replica_id] = self._loop.create_task(self._keep(replica_id, address), name=address)

    async def _keep(self, replica_id: str, address: str) -> None:
        """Keeps a connection to the replica: opens one after another, until the replica is dropped."""
        assert self._context is not None
        previous = self._ending.get(replica_id)
        if previous is not None:  # it must have left the fleet before this one joins
            await asyncio.wait([previous])
        while True:
            connection = _Connection(
                replica_id,
                address,
                self._context,
                self._fleet,
                self._metrics,
                self._peers,
                self._large,
                lambda report: self.on_usage(report),
            )
            self._connections[replica_id] = connection
            try:
                lost = await connection.run(self._notify)
            finally:
                if self._connections.get(replica_id) is connection:
                    del self._connections[replica_id]
            log.warning("lost replica %s at %s", replica_id, address)
            await asyncio.sleep(RECONNECT_S if lost else RECONNECT_MAX_S)
