"""The secret of the sockets in tests, and sockets of those who have it."""

from typing import Any

import zmq

from worker.curve import Curve

SECRET = b"the secret of tests, of 32 bytes"


def called(socket: "zmq.Socket[Any]", address: str, kind: str) -> None:
    """Connects a socket as one of the server's own processes does."""
    Curve(SECRET, kind).calls(socket)
    socket.connect(address)
