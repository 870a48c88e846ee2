"""The replica's socket around the engine: requests in, tokens, cache events and load out.

One loop in one thread: take what arrived, step, send. It blocks when there is nothing to compute.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import zmq

from radix.events import Event
from worker.config import WorkerConfig
from worker.engine import Engine, Parts, heap_at_rest, load_parts
from worker.messages import (
    Abort,
    CacheEvents,
    Failure,
    FromReplica,
    FromRouter,
    Generate,
    Output,
    Outputs,
    Subscribe,
    decode_from_router,
    encode,
)

log = logging.getLogger(__name__)

LOAD_EVERY_S = 0.05  # while steps run; a new request and the end of all work are told at once
PROBE_EVERY_S = 1.0  # how often routers that have gone are looked for, while there is work
MESSAGES_A_STEP = 64  # a flood of requests must not hold up those that run
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000  # a router that is silent for so long is gone, a host that vanished included


class Server:
    """Serves one model on a ZeroMQ ROUTER socket. A router is known by its connection: it must not set an identity of
    its own, so that a new connection is a new router and never goes on in the middle of a stream."""

    def __init__(
        self,
        model_dir: Path,
        config: WorkerConfig,
        host: str = "127.0.0.1",
        *,
        load: Callable[[Path, WorkerConfig], Parts] = load_parts,
    ) -> None:
        """Loads the model, then binds to a free port of `host`; `address` says where. Raises what loading raises, and
        ValueError for a host that is not this machine's."""
        self._events: list[Event] = []
        self._next_event = 0  # its number
        self.incarnation = os.urandom(8).hex()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stopping = threading.Event()
        self._questions: SimpleQueue[tuple[Callable[[Engine], Any], Future[Any]]] = SimpleQueue()
        self.engine = Engine(model_dir, config, on_event=self._events.append, on_ready=self._wake, load=load)
        self._page_size = config.page_size

        self._owners: dict[str, bytes] = {}  # request id: router
        self._bookings: dict[bytes, int] = {}  # of every router heard from, the highest
        self._subscribers: set[bytes] = set()
        self._load_due = False
        self._load_sent_s = 0.0
        self._probed_s = 0.0
        self._context = zmq.Context()
        try:
            self._socket = self._bind(host)
        except zmq.ZMQError as error:
            self.engine.close()
            self._context.term()
            raise ValueError(f"cannot listen on {host!r}: {error}; give an address of this machine") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """Serves until `stop`, then frees everything. Raises what the engine cannot survive (`DeviceLost`)."""
        try:
            with heap_at_rest():
                while not self._stopping.is_set():
                    self._receive()
                    if self.engine.has_work:
                        self._send_outputs(self.engine.step())
                        if not self.engine.has_work:
                            self._load_due = True
                    self._publish()
                    self._probe()
                    if not self.engine.has_work:
                        self._answer()
        finally:
            self.close()

    def stop(self) -> None:
        """Ends `run` after the step that it is in. From any thread."""
        self._stopping.set()
        self._wake()

    def at_rest(self, read: Callable[[Engine], Any]) -> Any:
        """What `read` gives of the engine when there is nothing to compute: in the thread of `run`, since nobody else
        may touch it. From any other one. Raises what `read` does, and RuntimeError if `run` ends before."""
        asked: Future[Any] = Future()
        self._questions.put((read, asked))
        if self._socket.closed:
            self._dismiss()  # nobody else is going to
        else:
            self._wake()
        return asked.result()

    def close(self) -> None:
        """Gives back the port, the model and the compiler's thread. Not while another thread is in `run`."""
        if not self._socket.closed:
            self._socket.close(linger=0)
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

    # ------------------------------------------------------------ in

    def _receive(self) -> None:
        """Takes what has arrived; waits for something when there is nothing to compute."""
        if not self.engine.has_work:
            self._wait()
        for _ in range(MESSAGES_A_STEP):
            try:
                router, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                log.warning("dropped a message that is not one frame")
                continue
            try:
                message = decode_from_router(frame)
            except msgspec.DecodeError as error:
                log.warning("dropped a frame of %d bytes that is no message: %s", len(frame), error)
                continue
            self._take(router, message)

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        # Requests whose grammar compiles are owed something while nothing runs.
        timeout_ms = int(PROBE_EVERY_S * 1000) if self._owners else None
        if self._wake_out.fileno() in dict(poller.poll(timeout_ms)):
            self._wake_out.recv(4096)

    def _take(self, router: bytes, message: FromRouter) -> None:
        self._bookings.setdefault(router, 0)
        if isinstance(message, Generate):
            self._bookings[router] = max(self._bookings[router], message.booking)
            self._load_due = True
            self._generate(router, message)
        elif isinstance(message, Abort):
            mine = [i for i in message.request_ids if self._owners.get(i) == router]
            self._abort(mine)
        elif isinstance(message, Subscribe):
            self._subscribe(router)

    def _generate(self, router: bytes, request: Generate) -> None:
        request_id = request.request_id
        if request_id in self._owners:
            self._refuse(router, request_id, Failure("invalid", f"request id {request_id!r} is in use"))
            return
        try:
            self.engine.add(request)
        except Exception as error:
            log.exception("request %s could not be taken", request_id)
            self.engine.abort([request_id])
            failure = Failure("internal", f"the request could not be taken: {type(error).__name__}: {error}")
            self._refuse(router, request_id, failure)
        else:
            self._owners[request_id] = router

    def _refuse(self, router: bytes, request_id: str, failure: Failure) -> None:
        self._send(router, Outputs([Output(request_id=request_id, finish_reason="error", failure=failure)]))

    def _abort(self, request_ids: list[str]) -> None:
        self.engine.abort(request_ids)
        for request_id in request_ids:
            self._owners.pop(request_id, None)
        self._load_due = True

    def _subscribe(self, router: bytes) -> None:
        self._send_events()  # so that the snapshot's number is the next for everybody
        self._subscribers.add(router)
        snapshot = CacheEvents(
            incarnation=self.incarnation,
            first_seq=self._next_event,
            events=list(self.engine.snapshot()),
            page_size=self._page_size,
            snapshot=True,
        )
        self._send(router, snapshot)
        self._load_due = True

    # ------------------------------------------------------------ out

    def _send_outputs(self, outputs: list[Output]) -> None:
        by_router: dict[bytes, list[Output]] = {}
        for output in outputs:
            router = self._owners.get(output.request_id)
            if router is None:
                continue  # its router has gone since
            by_router.setdefault(router, []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        for router, its_outputs in by_router.items():
            self._send(router, Outputs(its_outputs))

    def _publish(self) -> None:
        """Tells subscribers what is cached and what is carried."""
        self._send_events()
        now_s = time.monotonic()
        if not self._load_due and (not self.engine.has_work or now_s - self._load_sent_s < LOAD_EVERY_S):
            return
        self._load_due = False
        self._load_sent_s = now_s
        if self._subscribers:
            load = self.engine.load()
            load.incarnation = self.incarnation
            for router in list(self._subscribers):
                load.bookings_seen = self._bookings[router]
                self._send(router, load)

    def _send_events(self) -> None:
        if not self._events:
            return
        message = CacheEvents(
            incarnation=self.incarnation,
            first_seq=self._next_event,
            events=list(self._events),
            page_size=self._page_size,
        )
        self._next_event += len(self._events)
        self._events.clear()
        for router in list(self._subscribers):
            self._send(router, message)

    def _probe(self) -> None:
        """Looks for routers that have gone while nothing was sent to them, because their requests wait: ZeroMQ tells on
        sending only, so they are sent an empty message."""
        now_s = time.monotonic()
        if now_s - self._probed_s > PROBE_EVERY_S:
            self._probed_s = now_s
            for router in list(self._bookings):
                self._send(router, Outputs([]))

    def _send(self, router: bytes, message: FromReplica) -> None:
        """Queues a message without a limit: tokens are never dropped. Forgets a router that has gone."""
        try:
            self._socket.send_multipart([router, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.info("a router has gone: its requests are aborted")
            self._subscribers.discard(router)
            self._bookings.pop(router, None)
            self._abort([i for i, owner in self._owners.items() if owner == router])

    # ------------------------------------------------------------ the socket

    def _bind(self, host: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.SNDHWM, 0)
        router.set(zmq.RCVHWM, 0)
        router.set(zmq.LINGER, 0)
        router.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        router.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        try:
            router.bind(f"tcp://{host}:*")
        except zmq.ZMQError:
            router.close()
            raise
        return router

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except OSError:
            return  # full: it is going to wake anyway; or closed
