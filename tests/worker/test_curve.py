"""Who has the secret is admitted, and nobody else."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import zmq

from tests import strangers
from tests.plane import SECRET, called
from worker import curve as keys
from worker.curve import Curve, Door
from worker.sparse_log import SparseLog

KIND = "tested"
MOST = 1000
GREETING = bytes([0xFF, *bytes(8), 0x7F, 3, 1]) + b"CURVE".ljust(20, b"\0") + bytes(32)  # rfc.zeromq.org/spec/23


class Listener:
    """A listening PULL socket."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.curve = Curve(SECRET, KIND)
        self.door = Door(self.context, self.curve, {self.socket: MOST})
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def heard(self) -> bytes:
        assert self.socket.poll(strangers.WAIT_MS)
        return self.socket.recv()

    def close(self) -> None:
        self.door.close()
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with contextlib.closing(Listener()) as made:
        yield made


@contextlib.contextmanager
def friend(address: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as caller:
        caller.linger = strangers.WAIT_MS
        called(caller, address, KIND)
        yield caller


def test_who_has_the_secret_is_heard_and_others_are_not(listener: Listener) -> None:
    others = [*strangers.wrong_keys(listener.curve, KIND), Curve(SECRET, "another kind")]
    for other in others:
        assert strangers.read_bytes(listener.address, other, [b"stranger"], zmq.PUSH) == 0
    with friend(listener.address) as caller:
        caller.send(b"friend")
    assert listener.heard() == b"friend" and not listener.socket.poll(0)


def test_without_a_door_nobody_is_admitted() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        curve = Curve(SECRET, KIND)
        curve.listens(socket, MOST)
        socket.bind("tcp://127.0.0.1:*")
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        assert strangers.read_bytes(address, curve, [b"too early"], zmq.PUSH) == 0
        assert not socket.poll(0)


def test_what_was_recorded_cannot_be_replayed(listener: Listener) -> None:
    url = urlsplit(listener.address)
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            near, _ = between.accept()
            with near, socket.create_connection((str(url.hostname), url.port or 0)) as far:
                back = threading.Thread(target=pump, args=(far, near, bytearray()))
                back.start()
                pump(near, far, recorded)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        with friend("tcp://{}:{}".format(*between.getsockname())) as caller:
            caller.send(b"once")
            assert listener.heard() == b"once"
        thread.join()
    assert len(recorded) > 500 and b"once" not in recorded
    strangers.hung_up_on(listener.address, bytes(recorded))
    assert not listener.socket.poll(0)


def pump(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            kept += piece
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("size", [MOST + 1, 1 << 31, 1 << 62])
def test_who_announces_too_much_is_disconnected(listener: Listener, size: int) -> None:
    assert b"WELCOME" not in strangers.hung_up_on(listener.address, GREETING + b"\x06" + size.to_bytes(8, "big"))
    with friend(listener.address) as caller:
        caller.send(bytes(MOST + 1))
        with friend(listener.address) as other:
            other.send(b"short")
        assert listener.heard() == b"short"
        caller.linger = 0


def test_who_says_nothing_is_in_nobodys_way_and_goes(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    with strangers.silent(listener.address, 200), friend(listener.address) as caller:
        caller.send(b"friend")
        assert listener.heard() == b"friend"
    monkeypatch.setattr(keys, "HANDSHAKE_MS", 50)
    with contextlib.closing(Listener()) as hasty:
        assert len(strangers.hung_up_on(hasty.address, b"")) <= len(GREETING)


def test_strangers_are_counted_and_fill_no_log(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            strangers.read_bytes(listener.address, strangers.WithoutKeys(), [b"stranger"], zmq.PUSH)
        with friend(listener.address) as caller:
            caller.send(b"friend")
            assert listener.heard() == b"friend"
        while listener.door.refused < 20:
            time.sleep(0.001)  # another thread's doing
    assert listener.door.refused == 20 and len(caplog.records) == 1


def test_warnings_that_come_often_are_written_seldom(caplog: pytest.LogCaptureFixture) -> None:
    for most, left_out in ((1, [0, 9, 9]), (3, [0, 0, 0, 7, 0, 0, 7, 0, 0])):
        seconds = iter(range(25))
        sparse = SparseLog(logging.getLogger("test"), every_s=10, clock=seconds.__next__, most=most)
        for _ in range(25):
            sparse.warning("from %s", "somebody")
        assert [record.args for record in caplog.records] == [("somebody", *filter(None, [n])) for n in left_out]
        caplog.clear()


def test_a_secret_has_a_length() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Curve(b"short", KIND)


def test_keys_differ_by_kind_and_secret() -> None:
    made = [Curve(SECRET, "a"), Curve(SECRET, "b"), Curve(bytes(32), "a")]
    assert len({pair for each in made for pair in (each._listener, each._caller)}) == 6
    assert Curve(SECRET, "a")._listener == made[0]._listener
    assert not any(SECRET.decode() in repr(each) for each in made)
