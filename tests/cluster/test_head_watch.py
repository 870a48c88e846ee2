"""A head that is lost is noticed within bounds, and said once; so is one that is back."""

import socket
import threading
from collections.abc import Iterator

import pytest

from cluster import head_watch
from cluster.head_watch import ANSWER_S, ASK_S, GIVE_UP_S, SILENT_S, HeadWatch


class Head:
    """Something that answers, or refuses, at an address of this machine."""

    def __init__(self) -> None:
        self._place = ("127.0.0.1", 0)
        self.answers()
        self._place = self._socket.getsockname()
        self.address = f"127.0.0.1:{self._place[1]}"
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def answers(self) -> None:
        self._socket = socket.create_server(self._place)

    def refuses(self) -> None:
        self._socket.close()


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.refuses()


def test_a_head_that_is_lost_is_said_once_and_so_is_its_return(head: Head) -> None:
    watch, said = HeadWatch(head.address, head.clock), dict[float, str]()
    for second in range(120):
        head.now_s = 100.0 + second
        if second == 20:
            head.refuses()
        if second == 80:
            head.answers()
        if line := watch.look():
            said[second] = line
        assert watch.is_lost is (len(said) == 1)
    lost, back = said
    assert 20 + SILENT_S - ASK_S <= lost <= 20 + SILENT_S + ASK_S and back == 80
    assert head.address in said[lost] and "has not answered for" in said[lost] and "refused" in said[lost]
    assert "answers again" in said[back]


def test_a_short_silence_is_none(head: Head) -> None:
    watch = HeadWatch(head.address, head.clock)
    for second in range(60):
        head.now_s = 100.0 + second
        if second % 9 == 1:
            head.refuses()
        if second % 9 == 8:
            head.answers()
        assert watch.look() is None
    assert not watch.is_lost


def test_a_head_that_stays_lost_is_given_up_before_ray_ends_the_process(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_watch, "ASK_S", 0.0)  # of the thread's clock, which the test does not wait for
    head.refuses()

    def clock() -> float:
        head.now_s += 1.0
        return head.now_s

    said: list[str] = []
    gone = threading.Event()
    HeadWatch(head.address, clock).follow(said.append, gone.set, threading.Event())
    assert gone.is_set() and len(said) == 1
    assert GIVE_UP_S + ASK_S + ANSWER_S < 60.0  # Ray's own


def test_one_that_ends_gives_up_nothing(head: Head) -> None:
    over = threading.Event()
    over.set()
    head.refuses()
    HeadWatch(head.address, head.clock).follow(pytest.fail, lambda: pytest.fail("given up"), over)
