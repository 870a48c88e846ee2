"""The store in which the ranks of a replica meet. PyTorch's own, TCPStore, answers everybody; this one answers those
who have the secret of its `Meeting`.

    NCCL, gloo, Rendezvous ── torch.distributed.Store ──▶ RankStore ── ZeroMQ, CURVE ──▶ StoreServer (a thread)

The server holds values and never waits. A client that waits for a key asks again and again, so that threads which share
a connection do not wait for each other, and a signal interrupts it.
"""

import contextlib
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch.distributed as dist
import zmq

from worker.curve import SECRET_BYTES, Curve, Door
from worker.errors import RankLost
from worker.parallel.meeting import Meeting

# A rank that loads may hold the GIL for long, and with it the thread that admits the others, who connect once.
CONNECT_S = 60.0
REPLY_S = 60.0  # the leading rank's process may be starved, or inside a library that holds the GIL for many seconds
LOOK_MS = 500  # between looks whether the connection still stands
FIRST_PAUSE_S, MAX_PAUSE_S = 0.001, 0.02  # between requests of who waits for a key
MAX_FRAME_BYTES = 1 << 24  # of a frame
KIND = "store"


class _StoreRequest(msgspec.Struct, array_like=True):
    """A request of a rank, with a number that the answer has too."""

    number: int
    action: Literal["set", "get", "has", "add", "append", "compare_set", "delete"]
    key: str
    values: list[Any] = []


class StoreServer:
    """The values, and a thread that gives them to all ranks."""

    def __init__(self, host: str) -> None:
        """Binds to a free port of `host`. Raises zmq.ZMQError."""
        self._values: dict[str, bytes] = {}
        secret = os.urandom(SECRET_BYTES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._door = Door(self._context, Curve(secret, KIND), {self._socket: MAX_FRAME_BYTES})
        self._socket.set(zmq.HANDSHAKE_IVL, int(CONNECT_S * 1000))
        self._ended = self._context.socket(zmq.PAIR)
        self._end = self._context.socket(zmq.PAIR)
        self._ended.bind("inproc://end")
        self._end.connect("inproc://end")
        try:
            self._socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError:
            self._free()
            raise
        self.meeting = Meeting(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), secret)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.send(b"")
        self._thread.join()
        self._free()

    def _free(self) -> None:
        self._door.close()
        for socket in (self._socket, self._ended, self._end):
            socket.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ended, zmq.POLLIN)
        decode = msgspec.msgpack.Decoder(_StoreRequest).decode
        while self._ended not in dict(poller.poll()):
            rank, frame = self._socket.recv_multipart()
            asked = decode(frame)
            answer = msgspec.msgpack.encode((asked.number, self._answer(asked.action, asked.key, *asked.values)))
            with contextlib.suppress(zmq.ZMQError):  # the rank has gone
                self._socket.send_multipart([rank, answer], zmq.NOBLOCK)

    def _answer(self, action: str, key: str, *values: Any) -> Any:
        now = self._values.get(key)
        match action:
            case "get":
                return now
            case "has":
                return all(each in self._values for each in (key, *values))
            case "set":
                self._values[key] = values[0]
            case "append":
                self._values[key] = (now or b"") + values[0]
            case "add":
                total = int(now or 0) + values[0]
                self._values[key] = str(total).encode()
                return total
            case "compare_set":
                expected, desired = values
                if (now or b"") != expected:
                    return expected if now is None else now
                self._values[key] = desired
                return desired
            case "delete":
                return self._values.pop(key, None) is not None
        return None


class RankStore(dist.Store):
    """A rank's connection to the store. Any thread may use it.

    C++ calls these methods by way of the Python object, so it must live as long as anything that was made with it. All
    methods raise RuntimeError when the store has gone.
    """

    def __init__(self, meeting: Meeting, server: StoreServer | None = None) -> None:
        """Connects. `server`: ends with this object. Raises RankLost if there is no answer."""
        super().__init__()
        self.set_timeout(timedelta(seconds=CONNECT_S))
        self.address, self.secret = meeting.address, meeting.secret
        self._lock = threading.Lock()
        self._number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IMMEDIATE, 1)  # it takes requests only while it is connected,
        self._socket.set(zmq.RECONNECT_IVL, -1)  # which it is once
        Curve(meeting.secret, KIND).calls(self._socket)
        self._socket.set(zmq.HANDSHAKE_IVL, int(CONNECT_S * 1000))
        self._socket.connect(meeting.address)
        self.close = weakref.finalize(self, _free, self._socket, self._context, server)
        if not self._socket.poll(int(CONNECT_S * 1000), zmq.POLLOUT):
            self.close()
            raise RankLost(f"the leading rank does not answer at {meeting.address}")

    def _ask(self, action: str, key: str, *values: Any) -> Any:
        with self._lock:
            self._number += 1
            try:
                self._socket.send(msgspec.msgpack.encode((self._number, action, key, values)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise RuntimeError(f"the store of the ranks has gone: {error}") from error
            until_s = time.monotonic() + REPLY_S
            while time.monotonic() < until_s:
                if self._socket.poll(LOOK_MS):
                    number, answer = msgspec.msgpack.decode(self._socket.recv())
                    if number == self._number:  # else of a request that a signal interrupted
                        return answer
                elif not self._socket.poll(0, zmq.POLLOUT):
                    break
            raise RuntimeError("the store of the ranks does not answer")

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value, once there is one. Raises DistStoreError if there is none within the store's timeout."""
        self.wait([key])
        value: bytes = self._ask("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._ask("compare_set", key, _bytes(expected), _bytes(desired)))

    def check(self, keys: list[str]) -> bool:
        return not keys or bool(self._ask("has", *keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for all keys. Raises DistStoreError if they do not come within `timeout`, or the store's."""
        within_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        until_s, pause_s = time.monotonic() + within_s, FIRST_PAUSE_S
        while not self.check(keys):
            if time.monotonic() > until_s:
                raise dist.DistStoreError(f"waited {within_s:g} s for {', '.join(keys)}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def deleteKey(self, key: str) -> bool:  # C++ calls it by this name
        return bool(self._ask("delete", key))

    def has_extended_api(self) -> bool:
        """C++ gets and sets one key at a time."""
        return False

    def clone(self) -> "RankStore":
        """The same: a thread that waits does not keep the connection from others."""
        return self


def open_store(host: str = "127.0.0.1") -> tuple[RankStore, Meeting]:
    """Opens the store in which the ranks of one replica meet, on a free port of this machine. Returns this process's
    connection to it, with which it ends, and what the other ranks need; `host` is the address at which they reach this
    machine."""
    server = StoreServer(host)
    return RankStore(server.meeting, server), server.meeting


def find_store(meeting: Meeting) -> RankStore:
    """Connects to the store that another process opened. Raises RankLost if there is no answer."""
    return RankStore(meeting)


def _free(socket: "zmq.Socket[bytes]", context: "zmq.Context[zmq.Socket[bytes]]", server: StoreServer | None) -> None:
    socket.close(linger=0)
    context.term()
    if server is not None:
        server.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
