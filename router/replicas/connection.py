"""A router's ZeroMQ connection to one replica, from its first attempt to connect to its loss.

A lost connection is noticed at once: TCP reports it, or ZeroMQ's heartbeats do when a machine vanishes. The replica's
I/O thread answers heartbeats, so a long step does not look like death.

A replica speaks every `BEAT_S`, also in the middle of a step. One that is connected and silent for `SILENT_S` is not
`ready` until it is heard again, so it gets no new requests. Its streams stay: only its process knows whether they will
go on, and ends if they will not. A replica that says that it leaves gets no new requests either.

When a connection is lost, every stream on it raises `ReplicaLost`, and the fleet forgets the replica.
"""

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from router.fleet.fleet import Fleet
from router.metrics.metrics import ModelMetrics
from router.replicas.peers import Peers
from router.replicas.stream import ReaderTooSlow, ReplicaLost, ReplicaStream
from worker.curve import Curve
from worker.messages import (
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    AdapterChange,
    CacheEvents,
    Failure,
    Farewell,
    Flush,
    FromReplica,
    FromRouter,
    Generate,
    Hello,
    Leaving,
    LengthSample,
    Output,
    Outputs,
    ReplicaLoad,
    Routers,
    Subscribe,
    UsageReport,
    decode_from_replica,
    encode,
    work_together,
)
from worker.sparse_log import SparseLog

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
LARGE_FRAME_BYTES = 1 << 14
HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class _Left(Exception):
    """The replica has said that it ends."""

    def __init__(self, farewell: Farewell) -> None:
        super().__init__(farewell.message)
        self.farewell = farewell


class _OtherProtocol(Exception):
    """The replica and this router do not understand each other."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"protocol {protocol}")
        self.protocol = protocol


class _NoHandshake(Exception):
    """The process at the replica's address does not encrypt, as replicas of older versions do not."""


class ReplicaConnection:
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
        curve: Curve,
        on_usage: Callable[[UsageReport], None],
        on_adapters: Callable[[AdapterChange], None],
    ) -> None:
        """`large`: held while a large frame is handled, by one of all connections at a time. `curve`: the keys that
        replicas admit."""
        self.replica_id = replica_id
        self._large = large
        self._peers = peers
        self._address = address
        self.connected = False
        self._log = logging.LoggerAdapter(log, {"replica": replica_id})
        self._protocol: int | None = None  # of the replica, from its first message on
        self._unheard_looks = 0
        self._is_in_queue = False  # a frame of it has come and waits for its turn
        self.streams: dict[str, ReplicaStream] = {}
        self._flushes: dict[str, asyncio.Future[ReplicaLoad | None]] = {}  # by the message's id
        self._unused = asyncio.Event()  # set while there are no streams
        self._unused.set()
        self._fleet = fleet
        self._metrics = metrics
        self._on_usage = on_usage
        self._on_adapters = on_adapters
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_S * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MAX_S * 1000))
        curve.calls(self._socket)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKE_EVENTS | zmq.EVENT_DISCONNECTED)
        self._strangers = SparseLog(self._log)

    async def run(self, changed: Callable[[], None]) -> float | None:
        """Returns when the connection is lost: seconds until the next may be tried, None if none could do better. Calls
        `changed` when the connection is made, ready, and lost, and when the replica leaves."""
        taken_away, reason = False, "lost"
        try:
            self._socket.connect(self._address)
            await self._handshake()
            self.connected = True
            self._fleet.join(self.replica_id)
            self.send(self._subscription(self._fleet.length_samples()))
            changed()
            await self._until_lost(changed)
            return RECONNECT_S
        except asyncio.CancelledError:
            taken_away = True
            raise
        except _Left as error:
            taken_away, reason = error.farewell.reason == "drained", error.farewell.reason
            self._log.log(
                logging.INFO if taken_away else logging.WARNING,
                "replica %s at %s ends: %s",
                *(self.replica_id, self._address, error.farewell.message),
            )
            return RECONNECT_S
        except _OtherProtocol as error:
            reason = "protocol"
            self._log.error(
                "refused replica %s at %s: it speaks protocol %d, this router %d; only neighbours work together: "
                "upgrade the older of them",
                *(self.replica_id, self._address, error.protocol, PROTOCOL),
            )
            return None
        except _NoHandshake:
            self._metrics.taken_out("protocol")
            self._log.error(
                "refused replica %s at %s: it does not encrypt as this router does; is it of another version?",
                *(self.replica_id, self._address),
            )
            return None
        except Exception:  # our own mistake, or the replica's: no request may hang because of it
            self._log.exception("the connection to replica %s at %s failed", self.replica_id, self._address)
            reason = "error"
            return RECONNECT_MAX_S
        finally:
            if self.connected and not taken_away:
                self._metrics.taken_out(reason)
            self._close(taken_away)
            changed()

    async def unused(self) -> None:
        """Returns once there are no streams."""
        await self._unused.wait()

    @property
    def knows_adapters(self) -> bool:
        """Whether the replica understands requests with adapters."""
        load = self._metrics.loads.get(self.replica_id)
        return load is not None and load.max_loras is not None

    def generate(self, request: Generate) -> ReplicaStream:
        """Sends the request at once. One that no replica would take from the network is refused here."""
        stream = ReplicaStream(request.request_id, self.abort)
        frame = encode(request)
        if len(frame) > MAX_FRAME_BYTES:
            failure = Failure(
                "invalid", f"the request takes {len(frame)} bytes within the server, above {MAX_FRAME_BYTES}"
            )
            stream.feed(Output(request_id=request.request_id, finish_reason="error", failure=failure))
            return stream
        self.streams[request.request_id] = stream
        self._unused.clear()
        self._socket.send(frame, zmq.NOBLOCK)
        return stream

    def flush(self, message: Flush) -> asyncio.Future[ReplicaLoad | None]:
        """Has the replica empty its cache. The result is the load with which it says so; None if it does not know how,
        or the connection is lost."""
        told: asyncio.Future[ReplicaLoad | None] = asyncio.get_running_loop().create_future()
        load = self._metrics.loads.get(self.replica_id)
        if load is None or load.flushed is None:
            told.set_result(None)
        else:
            self._flushes[message.id] = told
            self.send(message)
        return told

    def leave(self, changed: Callable[[], None]) -> None:
        """Counts the replica as one that gets no new requests, because it is being taken away."""
        if self.replica_id not in self._metrics.leaving:
            self._metrics.leaving.add(self.replica_id)
            changed()

    def look(self, changed: Callable[[], None]) -> None:
        """Called every `LOOK_EVERY_S`. Takes the replica out if it has been silent for `SILENT_LOOKS` looks."""
        if not self.connected or self._is_in_queue:
            return
        self._unheard_looks += 1
        if self._unheard_looks == SILENT_LOOKS:
            self._log.warning(
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
            self._log.info("replica %s at %s is heard again", self.replica_id, self._address)
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

    def _close(self, taken_away: bool) -> None:
        if self.connected:
            self.connected = False
            self._fleet.leave(self.replica_id)
            if self._peers is not None:
                self._peers.found(self.replica_id, {})
            self._metrics.lost(self.replica_id)
        streams, self.streams = self.streams, {}
        self._unused.set()
        for stream in streams.values():
            stream.fail(ReplicaLost(self.replica_id, taken_away))
        for told in self._flushes.values():
            told.set_result(None)
        self._flushes.clear()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def _handshake(self) -> None:
        """Returns when the replica and this router know each other. Raises _NoHandshake if they never will."""
        while (event := (await recv_monitor_message(self._monitor))["event"]) != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                raise _NoHandshake
            if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # it may have ended just now, too
                text = "replica %s at %s hangs up before it says who it is; is it another server's?"
                self._strangers.warning(text, self.replica_id, self._address)

    async def _event(self, wanted: int) -> None:
        while (await recv_monitor_message(self._monitor))["event"] != wanted:
            pass

    async def _read(self, changed: Callable[[], None]) -> None:
        """Handles the replica's messages. Raises msgspec.DecodeError for an invalid one."""
        while True:
            frame = await self._socket.recv()
            self._heard(changed)
            if len(frame) < LARGE_FRAME_BYTES:
                self._handle(decode_from_replica(frame), changed)
                continue
            self._is_in_queue = True
            async with self._large:
                self._is_in_queue = False
                self._handle(decode_from_replica(frame), changed)
                await asyncio.sleep(0)

    def _handle(self, message: FromReplica, changed: Callable[[], None]) -> None:
        if self._protocol is None:
            self._protocol = message.protocol if isinstance(message, Hello) else 1
            if not work_together(self._protocol, PROTOCOL):
                raise _OtherProtocol(self._protocol)
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
                for known in self._flushes.keys() & set(message.flushed or ()):
                    self._flushes.pop(known).set_result(message)
                if first:
                    changed()
            case UsageReport():
                self._on_usage(message)
            case AdapterChange():
                self._on_adapters(message)
            case Leaving():
                self._log.info("replica %s at %s leaves within %g s", self.replica_id, self._address, message.within_s)
                self.leave(changed)
            case Farewell():
                raise _Left(message)
            case Routers():
                if self._peers is not None:
                    self._peers.found(self.replica_id, message.addresses)

    def _subscription(self, samples: list[LengthSample] | None = None) -> Subscribe:
        message = Subscribe(protocol=PROTOCOL) if self._peers is None else self._peers.subscription()
        message.length_samples = samples or []
        message.adapters = True
        return message

    def _deliver(self, output: Output) -> None:
        stream = self.streams.get(output.request_id)
        if stream is None:
            return  # aborted a moment ago
        stream.feed(output)
        if output.finish_reason is not None:
            self._forget(output.request_id)
        elif stream.unread_tokens > MAX_UNREAD_TOKENS:
            self.abort([output.request_id])
            stream.fail(ReaderTooSlow())

    def send(self, message: FromRouter) -> None:
        """Sends at once. Never blocks, because the socket has no high-water mark."""
        self._socket.send(encode(message), zmq.NOBLOCK)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        if self.connected:
            self.send(Abort(request_ids))

    def _forget(self, request_id: str) -> None:
        self.streams.pop(request_id, None)
        if not self.streams:
            self._unused.set()
