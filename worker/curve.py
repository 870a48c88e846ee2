"""Identity and encryption of the sockets between processes: CURVE of ZeroMQ (https://rfc.zeromq.org/spec/26), with keys
that all processes of a server derive from one secret.

Two things keep a stranger out, each by itself:

1. A connection begins with a box for the listener's public key, which is derived from the secret too and never sent.
2. The listener admits one public key alone, that of `Curve.calls`. A caller proves that it has the private one.

The second would be enough if public keys were known. It is needed, too: a library of curves that accepts points of a
low order would open a box whose sender does not know the listener's key. Every connection has keys of its own, so
what was recorded can be neither replayed nor read later, when the secret has become known.
"""

import hmac
import logging
import threading
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import zmq
from zmq.utils import z85

from worker.sparse_log import SparseLog

log = logging.getLogger(__name__)

SECRET_BYTES = 32
REPLICA, ROUTER = "replica", "router"  # kinds
HANDSHAKE_MS = 10_000  # how long a stranger may hold a connection
_DOMAIN = b"shoal"
_ZAP = "inproc://zeromq.zap.01"  # https://rfc.zeromq.org/spec/27


class Curve:
    """The keys of one kind of sockets: of those that listen, and of those that call them."""

    def __init__(self, secret: bytes, kind: str) -> None:
        """`kind`: what listens. A caller of another kind is a stranger. Raises ValueError for a secret that has not
        `SECRET_BYTES`."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._listener = _pair(secret, f"{kind} listens")
        self._caller = _pair(secret, f"{kind} calls")

    def listens(self, socket: "zmq.Socket[Any]", most_bytes: int) -> None:
        """Prepares a socket before it binds. Its callers are admitted by a `Door`, without which there are none.
        `most_bytes`: of a frame; who announces a longer one is disconnected."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._listener[1])
        socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.MAXMSGSIZE, most_bytes)

    def calls(self, socket: "zmq.Socket[Any]") -> None:
        """Prepares a socket before it connects."""
        socket.set(zmq.CURVE_SERVERKEY, self._listener[0])
        socket.set(zmq.CURVE_PUBLICKEY, self._caller[0])
        socket.set(zmq.CURVE_SECRETKEY, self._caller[1])

    def admits(self, public_key: bytes) -> bool:
        """Whether a caller with this key, 32 bytes, has the secret."""
        return hmac.compare_digest(z85.encode(public_key), self._caller[0])


class Door:
    """Admits callers to the listening sockets of one context, in a thread, and counts the others."""

    def __init__(self, context: "zmq.Context[Any]", curve: Curve, sockets: Mapping["zmq.Socket[Any]", int]) -> None:
        """`sockets`: with the most bytes of a frame of each. They must not be bound yet."""
        self._curve = curve
        self._sockets = list(sockets)
        self.refused = 0
        self._log = SparseLog(log)
        self._asked = context.socket(zmq.REP, socket_class=zmq.Socket)
        self._asked.bind(_ZAP)
        self._ended = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._end = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._ended.bind("inproc://door")
        self._end.connect("inproc://door")
        self._monitors: list[zmq.Socket[bytes]] = []
        for number, (socket, most_bytes) in enumerate(sockets.items()):
            curve.listens(socket, most_bytes)
            address = f"inproc://door/{number}"
            socket.monitor(address, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
            monitor = context.socket(zmq.PAIR, socket_class=zmq.Socket)
            monitor.set(zmq.RCVHWM, 0)  # at the mark ZeroMQ's own thread would wait for the reader
            monitor.connect(address)
            self._monitors.append(monitor)
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Admits no more callers. Call this before the sockets are closed."""
        for socket in self._sockets:
            socket.monitor(None, 0)
        self._end.send(b"")
        self._thread.join()
        for own in (self._asked, self._ended, self._end, *self._monitors):
            own.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._asked, self._ended, *self._monitors):
            poller.register(socket, zmq.POLLIN)
        while True:
            found = dict(poller.poll())
            if self._ended in found:
                return
            if self._asked in found:
                self._asked.send_multipart(self._answer(self._asked.recv_multipart()))
            for monitor in self._monitors:
                if monitor in found:
                    monitor.recv_multipart()
                    self._refuse()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number, domain, _address, _identity, mechanism, *credentials = request
        if (domain, mechanism, len(credentials)) == (_DOMAIN, b"CURVE", 1) and self._curve.admits(credentials[0]):
            return [version, number, b"200", b"", b"", b""]
        return [version, number, b"400", b"", b"", b""]

    def _refuse(self) -> None:
        self.refused += 1
        self._log.warning("refused a connection of a process that does not know this server's secret")


def _pair(secret: bytes, label: str) -> tuple[bytes, bytes]:
    """A public and a private key, as ZeroMQ takes them."""
    private = z85.encode(blake2b(label.encode(), key=secret, digest_size=32).digest())
    return zmq.curve_public(private), private
