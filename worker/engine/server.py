"""The replica's server: a ZeroMQ socket and the loop around the engine. Requests come in; tokens, cache events and load
go out.

One thread runs the loop: receive, step, send. It blocks when there is nothing to compute. Every `BEAT_S` routers hear
something: an idle loop sends its load, and a second thread speaks while the loop is in a long step. A loop that hangs
outside of a step is silent, so routers send it nothing. The process that started the replica watches `Server.progress`,
and ends a replica whose work does not get on.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

import msgspec
import zmq

from radix.events import Event
from radix.snapshot import SnapshotWalk
from worker.config import WorkerConfig
from worker.curve import REPLICA, Curve, Door
from worker.engine.engine import Components, Engine, frozen_heap, load_components
from worker.messages import (
    BEAT_S,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    Adapter,
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
    Output,
    Outputs,
    Release,
    Routers,
    SamplingParams,
    Subscribe,
    UsageReport,
    decode_from_router,
    encode,
    work_together,
)
from worker.progress import WorkProgress
from worker.sparse_log import SparseLog

log = logging.getLogger(__name__)

# While steps run. An idle replica sends its load every `BEAT_S`; any sends it after a new request and the last step.
LOAD_EVERY_S = 0.05
PROBE_EVERY_S = 1.0  # how often lost routers are detected while there is work
FAREWELL_S = 0.5  # how long a thread with a last message waits for the socket
FLUSH_MS = 1000  # how long the last messages of a replica that was taken away may take to be sent
WARM_UP_TOKENS, WARM_UP_OUTPUTS = 8, 4  # less than a page: nothing stays in the cache
MESSAGES_A_STEP = 64  # a flood of requests must not delay the running ones
# Of snapshots of the radix tree, in each turn of the loop: about a millisecond's work, and of each at most this much,
# which takes a router about two milliseconds to read.
PIECE_NODES, PIECE_BYTES = 500, 1 << 20
EVENTS_A_MESSAGE = 500  # a router stops for no longer than for a piece


@dataclass(slots=True)
class SnapshotInPieces:
    """A snapshot on its way to one router: the walk, events that must be told before the next nodes, and the number of
    pieces that were sent."""

    walk: SnapshotWalk
    pending: list[Event] = field(default_factory=list)
    sent: int = 0


class Server:
    """Serves one model on a ZeroMQ ROUTER socket. A router is identified by its connection, and must not set an
    identity of its own: a router that reconnects counts as a new one, and never resumes in the middle of a stream."""

    def __init__(
        self,
        model_dir: Path,
        config: WorkerConfig,
        host: str = "127.0.0.1",
        *,
        secret: bytes,
        load: Callable[[Path, WorkerConfig], Components] = load_components,
    ) -> None:
        """Loads the model, then binds to a free port of `host`. `address` is the resulting ZeroMQ address, and routers
        are those who know `secret` (`worker.curve`). Raises ValueError if `host` is no address of this machine, and the
        exceptions of `load`."""
        self._events: list[Event] = []
        self._next_event = 0  # number of the next event
        self.incarnation = os.urandom(8).hex()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stopping = threading.Event()
        self._questions: SimpleQueue[tuple[Callable[[Engine], Any], Future[Any]]] = SimpleQueue()
        self.engine = Engine(model_dir, config, on_event=self._events.append, on_ready=self._wake, load=load)
        self._page_size = config.page_size

        self._owners: dict[str, bytes] = {}  # request id: router
        self._bookings: dict[bytes, int] = {}  # router: its highest booking so far
        self._subscribers: set[bytes] = set()  # those that have a whole snapshot
        self._snapshots: dict[bytes, SnapshotInPieces] = {}  # those that have not, in their turns
        self._peers: dict[bytes, Subscribe] = {}  # those with a name, with what they said
        self._protocols: dict[bytes, int] = {}  # of those that have subscribed
        self._refused_routers = 0
        self._hears_adapters: set[bytes] = set()  # the routers that understand `AdapterChange`
        self._adapters: dict[str, Adapter] = {}  # those that clients have loaded at any router, by name
        self._drain_until_s: float | None = None  # once the replica is being taken away
        self._has_said_leaving = False
        self._load_due = False
        self._load_sent_s = 0.0
        self._flushed: list[str] = []  # since the last load
        self._talking = threading.Lock()  # held by the thread that uses the socket: the loop, except during a step
        self._ended = threading.Event()
        self._probed_s = 0.0
        self._progress = 0  # of the loop, besides steps, which are counted apart
        self._is_idle = True  # whether the loop waits for something to do
        self._odd_frames = SparseLog(log)
        self._context = zmq.Context()
        self._socket = self._open()
        self._door = Door(self._context, Curve(secret, REPLICA), {self._socket: MAX_FRAME_BYTES})
        try:
            self._socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"cannot listen on {host!r}: {error}; give an address of this machine") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def warm_up(self) -> None:
        """Lets a short prompt go through all that a step does, so that nothing is left to compile or to load for the
        first request. Call it before `run`, while the other ranks run: routers hear of this replica after it. Leaves
        nothing in the cache."""
        self._is_idle = False
        length = min(WARM_UP_TOKENS, min(self.engine.scheduler.context_length, self._page_size) - WARM_UP_OUTPUTS)
        if length > 0:
            sampling = SamplingParams(
                max_tokens=WARM_UP_OUTPUTS, temperature=1.0, top_p=0.9, top_k=50, seed=0, ignore_eos=True
            )
            self.engine.generate([[0] * length], sampling)
        self._is_idle = True

    def run(self) -> None:
        """Serves until `stop`, or the end of a `drain`, then frees everything. Raises DeviceLost, after which the
        engine cannot go on."""
        beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        beats.start()
        try:
            with frozen_heap(), self._talking:
                while not self._stopping.is_set():
                    if self._drain_until_s is not None and self._is_drained(self._drain_until_s):
                        break
                    self._receive()
                    if self.engine.has_work:
                        outputs = self._step()
                        self._send_outputs(outputs)
                        self._progress += bool(outputs)
                        if not self.engine.has_work:
                            self._load_due = True
                    self._publish()
                    self._probe()
                    if not self.engine.has_work:
                        self._answer()
        finally:
            self._ended.set()
            beats.join()
            self.close()

    @property
    def device(self) -> str:
        """The kind of device that computes steps: `cpu`, `cuda`."""
        return self.engine.executor.device.type

    @property
    def progress(self) -> WorkProgress | None:
        """How far the work is; None while there is none. A number that stays the same for longer than the limit means
        that a step hangs, or that no step comes about. May be called from any thread."""
        if self._is_idle:
            return None
        watch = self.engine.watch
        return WorkProgress(self._progress + watch.ended, watch.limit_s)

    def farewell(self, reason: Literal["hung"], message: str) -> bool:
        """Tells routers that this replica is about to end, and why, so that they need not find out. Returns whether it
        could. May be called from any thread, also while the loop hangs in a step."""
        if self._ended.is_set() or not self._talking.acquire(timeout=FAREWELL_S):
            return False
        try:
            frame = encode(Farewell(reason, message))
            for router in self._listeners():
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.send_multipart([router, frame], zmq.NOBLOCK)
        finally:
            self._talking.release()
        return True

    def drain(self, within_s: float) -> None:
        """Takes the replica away: routers are told to send nothing new, and `run` returns when the requests that are
        here have ended, at the latest after `within_s` seconds. Routers then resume the rest elsewhere. May be called
        from any thread; of several calls the first counts."""
        if self._drain_until_s is None:
            self._drain_until_s = time.monotonic() + within_s
            self._wake()

    def stop(self) -> None:
        """Ends `run` after its current step. May be called from any thread."""
        self._stopping.set()
        self._wake()

    def at_rest(self, read: Callable[[Engine], Any]) -> Any:
        """Runs `read` on the engine when there is nothing to compute, and returns its result.

        `read` runs in the thread of `run`, because no other thread may use the engine. Call this from another thread.
        Raises the exceptions of `read`, and RuntimeError if `run` ends before.
        """
        asked: Future[Any] = Future()
        self._questions.put((read, asked))
        if self._socket.closed:
            self._dismiss()  # `run` has ended, so no other call does it
        else:
            self._wake()
        return asked.result()

    def close(self) -> None:
        """Frees the port, the model and the grammar compiler's thread. Must not be called while another thread is in
        `run`."""
        if not self._socket.closed:
            self._door.close()
            self._socket.close(linger=FLUSH_MS if self._has_said_leaving else 0)
            self._context.term()
            self.engine.close()
            self._wake_in.close()
            self._wake_out.close()
        self._dismiss()

    def _answer(self) -> None:
        for read, asked in self._asked():
            try:
                asked.set_result(read(self.engine))
            except Exception as error:
                asked.set_exception(error)

    def _dismiss(self) -> None:
        for _, asked in self._asked():
            asked.set_exception(RuntimeError("the replica has ended"))

    def _asked(self) -> Iterator[tuple[Callable[[Engine], Any], Future[Any]]]:
        with contextlib.suppress(Empty):
            while True:
                yield self._questions.get_nowait()

    def _step(self) -> list[Output]:
        """Runs a step. Meanwhile the other thread may use the socket."""
        self._talking.release()
        try:
            return self.engine.step()
        finally:
            self._talking.acquire()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._say_alive()

    def _say_alive(self) -> bool:
        """Sends an empty message to the routers if the loop is in a step; returns whether it is. Routers that are gone
        are left to the loop, since the engine cannot abort in the middle of a step."""
        if not self._talking.acquire(blocking=False):
            return False
        try:
            for router in self._listeners():
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.send_multipart([router, encode(Outputs([]))], zmq.NOBLOCK)
        finally:
            self._talking.release()
        return True

    # ------------------------------------------------------------ the end

    def _is_drained(self, until_s: float) -> bool:
        """Says that the replica leaves, once, and that it ends, when it may. Returns whether it may."""
        left_s = until_s - time.monotonic()
        if not self._has_said_leaving:
            self._has_said_leaving = True
            self._tell_all(Leaving(max(0.0, left_s)))
        if self._owners and left_s > 0:
            return False
        self._tell_all(Farewell("drained", f"it was taken away; {len(self._owners)} of its requests go on elsewhere"))
        return True

    def _tell_all(self, message: Leaving | Farewell) -> None:
        """Tells the routers that know such messages. The others find out from Ray, or from the end of the process."""
        for router in self._listeners():
            if self._protocols.get(router, 0) >= 2:  # it may have been forgotten on the way
                self._send(router, message)

    # ------------------------------------------------------------ in

    def _receive(self) -> None:
        """Takes the messages that have arrived. Waits for a message if there is nothing to compute, and as long as
        planning of the next step can be put off."""
        if not self.engine.has_work:
            # Requests may wait for their grammars to compile while nothing runs: their routers are probed.
            self._wait(0 if self._snapshots else self._idle_ms())
        until_s = time.monotonic() + self.engine.spare_s()
        self._handle_arrived()
        while (left_ms := int((until_s - time.monotonic()) * 1000)) > 0 and not self._stopping.is_set():
            self._wait(left_ms)
            self._handle_arrived()

    def _handle_arrived(self) -> None:
        for _ in range(MESSAGES_A_STEP):
            try:
                router, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                self._odd_frames.warning("dropped a message that is not one frame")
                continue
            try:
                message = decode_from_router(frame)
            except msgspec.DecodeError as error:
                self._odd_frames.warning("dropped a frame of %d bytes that is not a message: %s", len(frame), error)
                continue
            self._handle(router, message)

    def _idle_ms(self) -> int:
        """Until the load is due, or lost routers are to be detected."""
        left_s = min(self._load_sent_s + BEAT_S - time.monotonic(), PROBE_EVERY_S)
        if self._drain_until_s is not None:
            left_s = min(left_s, self._drain_until_s - time.monotonic())
        return max(0, int(left_s * 1000)) + 1

    def _wait(self, timeout_ms: int) -> None:
        """Waits until a message arrives, `_wake` is called, or the timeout has passed."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        self._is_idle = not self.engine.has_work
        found = dict(poller.poll(timeout_ms))
        if self._is_idle:
            self._progress += 1
        self._is_idle = False
        if self._wake_out.fileno() in found:
            self._wake_out.recv(4096)

    def _handle(self, router: bytes, message: FromRouter) -> None:
        self._bookings.setdefault(router, 0)
        if isinstance(message, Generate):
            self._bookings[router] = max(self._bookings[router], message.booking)
            self._load_due = True
            self._generate(router, message)
        elif isinstance(message, Abort):
            mine = [i for i in message.request_ids if self._owners.get(i) == router]
            self._abort(mine)
        elif isinstance(message, Release):
            self.engine.release(message.owners)
            self._load_due = True
        elif isinstance(message, Flush):
            self.engine.flush_cache()
            self._flushed.append(message.id)
            self._load_due = True
        elif isinstance(message, Subscribe):
            self._subscribe(router, message)
        elif isinstance(message, AdapterChange):
            self._change_adapters(router, message)
        elif isinstance(message, UsageReport):
            for other in self._listeners():
                if other != router:
                    self._send(other, message)

    def _generate(self, router: bytes, request: Generate) -> None:
        request_id = request.request_id
        if request_id in self._owners:
            self._refuse(router, request_id, Failure("invalid", f"request id {request_id!r} is in use"))
            return
        try:
            self.engine.add(request)
        except Exception as error:
            log.exception("request %s could not be taken", request_id, extra={"sequence": request_id})
            self.engine.abort([request_id])
            failure = Failure("internal", f"the request could not be taken: {type(error).__name__}: {error}")
            self._refuse(router, request_id, failure)
        else:
            self._owners[request_id] = router

    def _refuse(self, router: bytes, request_id: str, failure: Failure) -> None:
        self._send(router, Outputs([Output(request_id=request_id, finish_reason="error", failure=failure)]))

    def _abort(self, request_ids: list[str]) -> None:
        self.engine.abort(request_ids)
        self._progress += 1
        for request_id in request_ids:
            self._owners.pop(request_id, None)
        self._load_due = True

    def _subscribe(self, router: bytes, message: Subscribe) -> None:
        if message.protocol >= 2:
            self._send(router, Hello(PROTOCOL))
        if not work_together(message.protocol, PROTOCOL):
            self._refused_routers += 1
            self._load_due = True
            log.error(
                "refused router %s at %s: it speaks protocol %d, this replica %d; only neighbours work together: "
                "upgrade the older of them",
                *(message.router or "(no name)", message.address or "(no address)", message.protocol, PROTOCOL),
            )
            return
        self.engine.scheduler.lengths.begin_with(message.length_samples)
        message.length_samples = []
        self._send_events()  # these are in the tree already, where the walk begins
        if router not in self._bookings:
            return  # it has gone, and is forgotten
        self._protocols[router] = message.protocol
        self._subscribers.discard(router)
        self._snapshots.pop(router, None)
        self._snapshots[router] = SnapshotInPieces(self.engine.walk())
        self._load_due = True
        is_new_peer = bool(message.router) and router not in self._peers
        if is_new_peer:
            self._peers[router] = message
        if message.adapters:
            self._hears_adapters.add(router)
        # All state of the router is recorded before the first send: a send that fails deletes all of it.
        if self._adapters and message.adapters:
            self._send(router, AdapterChange(list(self._adapters.values())))
        if is_new_peer:
            self._tell_peers()
        if self._drain_until_s is not None and message.protocol >= 2:
            self._send(router, Leaving(max(0.0, self._drain_until_s - time.monotonic())))

    def _change_adapters(self, router: bytes, change: AdapterChange) -> None:
        self._adapters |= {adapter.name: adapter for adapter in change.loaded}
        for name in change.unloaded:
            self._adapters.pop(name, None)
        for other in self._listeners():
            if other != router and other in self._hears_adapters:
                self._send(other, change)

    # ------------------------------------------------------------ out

    def _send_outputs(self, outputs: list[Output]) -> None:
        by_router: dict[bytes, list[Output]] = {}
        for output in outputs:
            router = self._owners.get(output.request_id)
            if router is None:
                continue  # the router is gone
            by_router.setdefault(router, []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        for router, its_outputs in by_router.items():
            self._send(router, Outputs(its_outputs))

    def _publish(self) -> None:
        """Sends subscribers new cache events, a piece of a snapshot, and the load if it is due."""
        self._send_events()
        self._send_piece()
        now_s = time.monotonic()
        every_s = LOAD_EVERY_S if self.engine.has_work else BEAT_S
        if not self._load_due and now_s - self._load_sent_s < every_s:
            return
        self._load_due = False
        self._load_sent_s = now_s
        listeners = self._listeners()
        if listeners:
            load = self.engine.load()
            load.incarnation = self.incarnation
            load.length_sample = self.engine.scheduler.lengths.take_sample()
            load.refused_routers = self._refused_routers
            load.flushed, self._flushed = self._flushed, []
            load.peers_seen = {peer.router: self._bookings[router] for router, peer in self._peers.items()}
            for router in listeners:
                if router in self._bookings:  # else forgotten on the way
                    load.bookings_seen = self._bookings[router]
                    self._send(router, load)

    def _listeners(self) -> list[bytes]:
        """The routers that have subscribed, with or without the whole snapshot."""
        return [*self._subscribers, *self._snapshots]

    def _tell_peers(self) -> None:
        """Tells the routers of each other, after one came or went."""
        message = Routers({peer.router: peer.address for peer in self._peers.values()})
        for router in list(self._peers):
            self._send(router, message)

    def _send_events(self) -> None:
        for snapshot in self._snapshots.values():
            snapshot.pending += filter(snapshot.walk.follows, self._events)
        for begin in range(0, len(self._events), EVENTS_A_MESSAGE):
            events = self._events[begin : begin + EVENTS_A_MESSAGE]
            message = CacheEvents.of(self.incarnation, self._next_event, events, self._page_size)
            frame = encode(message)
            self._next_event += len(message.events)
            for router in list(self._subscribers):
                self._send_frame(router, frame)
        self._events.clear()

    def _send_piece(self) -> None:
        """Sends one piece of a snapshot. No event may be unsent: the walk reads the tree as it is now."""
        if not self._snapshots:
            return
        router, snapshot = next(iter(self._snapshots.items()))
        del self._snapshots[router]
        events: list[Event] = snapshot.pending[:PIECE_NODES]
        del snapshot.pending[:PIECE_NODES]
        events += snapshot.walk.piece(PIECE_NODES - len(events), PIECE_BYTES)
        complete = snapshot.walk.is_done and not snapshot.pending
        # The next in turn is another router: that which joined last waits no longer than that which joined first.
        if complete:
            self._subscribers.add(router)
        else:
            self._snapshots[router] = snapshot
        message = CacheEvents.of(
            self.incarnation, self._next_event, events, self._page_size, piece=snapshot.sent, complete=complete
        )
        snapshot.sent += 1
        self._send(router, message)

    def _probe(self) -> None:
        """Detects routers that are gone although nothing is sent to them, because their requests wait. ZeroMQ reports a
        lost peer only on sending, so every router gets an empty message."""
        now_s = time.monotonic()
        if now_s - self._probed_s > PROBE_EVERY_S:
            self._probed_s = now_s
            for router in list(self._bookings):
                self._send(router, Outputs([]))

    def _send(self, router: bytes, message: FromReplica) -> None:
        self._send_frame(router, encode(message))

    def _send_frame(self, router: bytes, frame: bytes) -> None:
        """Queues a message. The queue has no limit, so no tokens are dropped. If the router is gone, forgets it and
        aborts its requests."""
        try:
            self._socket.send_multipart([router, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.info("a router has gone: its requests are aborted")
            self._subscribers.discard(router)
            self._snapshots.pop(router, None)
            self._bookings.pop(router, None)
            self._protocols.pop(router, None)
            self._hears_adapters.discard(router)
            was_peer = self._peers.pop(router, None) is not None
            self._abort([i for i, owner in self._owners.items() if owner == router])
            if was_peer:
                self._tell_peers()

    # ------------------------------------------------------------ the socket

    def _open(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.SNDHWM, 0)
        router.set(zmq.RCVHWM, 0)
        router.set(zmq.LINGER, 0)
        router.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        router.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        return router

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except OSError:
            return  # full, so the loop wakes anyway; or closed
