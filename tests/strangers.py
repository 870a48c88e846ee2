"""Processes without the secret: how they might speak with a listening socket."""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from worker.curve import SECRET_BYTES, Curve

WAIT_MS = 20_000
ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
FAILS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
SPEAKERS = (zmq.DEALER, zmq.PUSH, zmq.PULL, zmq.SUB, zmq.PUB)


class WithoutKeys:
    """Speaks in plain."""

    def calls(self, caller: "zmq.Socket[bytes]") -> None:
        pass


class WithAPassword:
    def calls(self, caller: "zmq.Socket[bytes]") -> None:
        caller.set(zmq.PLAIN_USERNAME, b"shoal")
        caller.set(zmq.PLAIN_PASSWORD, b"shoal")


class WithTheListenersKey:
    """Has learnt the listener's public key, but not the caller's private one."""

    def __init__(self, curve: Curve) -> None:
        self._known = curve._listener[0]

    def calls(self, caller: "zmq.Socket[bytes]") -> None:
        public, private = zmq.curve_keypair()
        caller.set(zmq.CURVE_SERVERKEY, self._known)
        caller.set(zmq.CURVE_PUBLICKEY, public)
        caller.set(zmq.CURVE_SECRETKEY, private)


Keys = WithoutKeys | WithAPassword | WithTheListenersKey | Curve


def wrong_keys(curve: Curve, kind: str) -> list[Keys]:
    """All keys that must open nothing where `curve`, of this kind, listens."""
    return [WithoutKeys(), WithAPassword(), WithTheListenersKey(curve), Curve(os.urandom(SECRET_BYTES), kind)]


def read_bytes(address: str, keys: Keys, frames: Sequence[bytes], speaker: int = zmq.DEALER) -> int:
    """Sends these frames to a listener, and returns how many bytes of messages it answers before it hangs up. Raises
    AssertionError if it admits the stranger."""
    with zmq.Context() as context, context.socket(speaker) as caller:
        caller.linger = 0
        caller.set(zmq.RECONNECT_IVL, -1)
        keys.calls(caller)
        monitor = caller.get_monitor_socket(ENDS | FAILS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        caller.connect(address)
        if speaker == zmq.SUB:
            caller.set(zmq.SUBSCRIBE, b"")
        if speaker not in (zmq.SUB, zmq.PULL):
            with contextlib.suppress(zmq.Again):
                for frame in frames:
                    caller.send(frame, zmq.NOBLOCK)
        try:
            assert monitor.poll(WAIT_MS), "the listener neither admits nor refuses"
            assert recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED, "a stranger is admitted"
        finally:
            caller.disable_monitor()
            monitor.close(linger=0)
        read = 0
        while speaker not in (zmq.PUSH, zmq.PUB) and caller.poll(0):
            read += len(caller.recv())
        return read


def hung_up_on(address: str, sent: bytes) -> bytes:
    """What a listener answers to these bytes before it hangs up."""
    url = urlsplit(address)
    answered = b""
    line = socket.create_connection((str(url.hostname), url.port or 0), timeout=WAIT_MS / 1000)
    with line, contextlib.suppress(ConnectionError):
        line.sendall(sent)
        while piece := line.recv(1 << 16):
            answered += piece
    return answered


@contextlib.contextmanager
def silent(address: str, count: int) -> Iterator[None]:
    """So many connections that say nothing."""
    url = urlsplit(address)
    with contextlib.ExitStack() as lines:
        for _ in range(count):
            lines.enter_context(socket.create_connection((str(url.hostname), url.port or 0), timeout=WAIT_MS / 1000))
        yield
