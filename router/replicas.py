"""The replicas that this router knows: one ZeroMQ connection to each, and the streams that run over it.

A connection that breaks is told at once (TCP tells, or ZeroMQ's heartbeats do when a machine vanishes: these are
answered by the replica's I/O thread, so a long step does not look like death). Every stream on it then raises
`ReplicaLost`, the fleet forgets the replica, and a new connection with a new identity is tried until the replica
is dropped: the replica knows a router by its identity, and aborts what the old one had asked for.
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
from router.metrics import Metrics
from worker.messages import (
    Abort,
    CacheEvents,
    FromRouter,
    Generate,
    Load,
    Output,
    Outputs,
    Subscribe,
    decode_from_replica,
    encode,
)

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
HEARTBEAT_TIMEOUT_S = 10.0
RECONNECT_S = 0.1
RECONNECT_MAX_S = 2.0
# A client that reads slower than the replica writes: its sequence is stopped when this many tokens are unread, and goes
# on when they are read. It holds no pages meanwhile, and no more than this much memory.
MAX_UNREAD_TOKENS = 2048


class ReplicaLost(Exception):
    """The replica of a stream is gone. `dropped`: it was taken away (`Replicas.set_replicas`), it did not die."""

    def __init__(self, replica_id: str, dropped: bool = False) -> None:
        super().__init__(f"replica {replica_id} {'was taken away' if dropped else 'is gone'}")
        self.replica_id = replica_id
        self.dropped = dropped


class ReaderTooSlow(Exception):
    """The stream was stopped because its outputs are not read; all that came before has been."""


class Stream:
    """The outputs of one request, as an async iterator for one reader; `close` it, finished or not.

    Outputs that wait are merged into one, so a reader that falls behind gets fewer and longer ones.
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
        """Raised to the reader once it has read what came before."""
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def __aiter__(self) -> "Stream":
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
        """If the request is still running, the replica is told to stop it."""
        if not self._done and self._error is None:
            self._connection.abort([self.request_id])


def _merged(first: Output, second: Output) -> Output:
    """One output that says what two in a row say."""
    return msgspec.structs.replace(
        first,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
        stop_token_id=second.stop_token_id,
        failure=second.failure,
    )


class _Connection:
    """One DEALER socket to one replica, from its first attempt to connect to its loss."""

    def __init__(
        self, replica_id: str, address: str, context: zmq.asyncio.Context, fleet: Fleet, metrics: Metrics
    ) -> None:
        self.replica_id = replica_id
        self._address = address
        self.connected = False
        self.streams: dict[str, Stream] = {}
        self._fleet = fleet
        self._metrics = metrics
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(HEARTBEAT_TIMEOUT_S * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_S * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MAX_S * 1000))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    async def run(self, changed: Callable[[], None]) -> bool:
        """Returns when the connection is lost, False if not by the other side's doing. `changed` is called when it is
        made, ready, and lost."""
        dropped = False
        try:
            self._socket.connect(self._address)
            await self._event(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self.connected = True
            self._fleet.join(self.replica_id)
            self.send(Subscribe())
            changed()
            await self._until_lost(changed)
            return True
        except asyncio.CancelledError:
            dropped = True
            raise
        except Exception:  # a message of another version, or our own mistake: no request may hang because of it
            log.exception("the connection to replica %s at %s failed", self.replica_id, self._address)
            return False
        finally:
            self._close(dropped)
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
            self._metrics.loads.pop(self.replica_id, None)
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
        """Raises msgspec.DecodeError for a message that is none: the other side speaks another version."""
        while True:
            message = decode_from_replica(await self._socket.recv())
            match message:
                case Outputs():
                    for output in message.outputs:
                        self._deliver(output)
                case CacheEvents():
                    if not self._fleet.apply_events(self.replica_id, message):
                        self.send(Subscribe())  # there was a gap
                case Load():
                    first = self.replica_id not in self._metrics.loads
                    self._metrics.loads[self.replica_id] = message
                    self._fleet.apply_load(self.replica_id, message)
                    if first:
                        changed()

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
        """At once: the socket has no high-water mark, so it never blocks."""
        self._socket.send(encode(message), zmq.NOBLOCK)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.streams.pop(request_id, None)
        if self.connected:
            self.send(Abort(request_ids))


class Replicas:
    """All connections. Everything but `set_replicas` is for the event loop that called `start`."""

    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._addresses: dict[str, str] = {}
        self._connections: dict[str, _Connection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # named after the address
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.asyncio.Context | None = None
        self._changed = asyncio.Event()

    def set_replicas(self, addresses: Mapping[str, str]) -> None:
        """From now on these are the replicas: id to ZeroMQ address. Thread-safe, also before `start`. New ones are
        connected, those that are not named any more (or have moved) are dropped with their streams."""
        self._addresses = dict(addresses)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing to keep up to date
                self._loop.call_soon_threadsafe(self._reconcile)

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._loop = asyncio.get_running_loop()
        self._reconcile()

    async def close(self) -> None:
        self._loop = None
        tasks = [*self._tasks.values(), *self._ending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    @property
    def ready(self) -> frozenset[str]:
        """Replicas that are connected and have told their load: they can answer."""
        return frozenset(self._metrics.loads)

    @property
    def known(self) -> frozenset[str]:
        """All of `set_replicas`, connected or not."""
        return frozenset(self._addresses)

    async def changed(self) -> None:
        """Returns after the next change of `ready`."""
        await self._changed.wait()

    def generate(self, replica_id: str, request: Generate) -> Stream:
        """Sends the request, at once. Raises ReplicaLost if the replica is not connected. The stream raises it when the
        connection breaks, and ReaderTooSlow when its outputs are not read."""
        connection = self._connections.get(replica_id)
        if connection is None or not connection.connected:
            raise ReplicaLost(replica_id)
        stream = Stream(connection, request.request_id)
        connection.streams[request.request_id] = stream
        connection.send(request)
        return stream

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
        """One connection after another, until the replica is dropped."""
        assert self._context is not None
        previous = self._ending.get(replica_id)
        if previous is not None:  # it must have left the fleet before this one joins
            await asyncio.wait([previous])
        while True:
            connection = _Connection(replica_id, address, self._context, self._fleet, self._metrics)
            self._connections[replica_id] = connection
            try:
                lost = await connection.run(self._notify)
            finally:
                if self._connections.get(replica_id) is connection:
                    del self._connections[replica_id]
            log.warning("lost replica %s at %s", replica_id, address)
            await asyncio.sleep(RECONNECT_S if lost else RECONNECT_MAX_S)
