"""Requests wait for all of their conditions, and for the first that fails."""

from collections import deque
from concurrent.futures import Future

import pytest

from worker.engine.readiness import Readiness
from worker.messages import Failure

FAILURE = Failure("invalid", "it cannot be")


class Source:
    """Tells what the test puts into `news`."""

    def __init__(self) -> None:
        self.news: deque[tuple[str, Failure | None]] = deque()
        self.futures: list[Future[None]] = []
        self.forgotten: list[str] = []

    def __len__(self) -> int:
        return len(self.news)

    @property
    def has_ready(self) -> bool:
        return bool(self.news)

    def poll(self):
        while self.news:
            yield self.news.popleft()

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


@pytest.fixture
def sources() -> dict[str, Source]:
    return {name: Source() for name in ("grammar", "adapter", "kv")}


def test_a_request_is_ready_when_its_last_condition_holds(sources: dict[str, Source]) -> None:
    readiness = Readiness(sources)
    readiness.wait_for("one", ["grammar"])
    readiness.wait_for("all", sources)
    readiness.wait_for("none", [])
    assert not readiness.has_ready and len(readiness) == 2 and not readiness.missing("none")
    sources["kv"].news += [("all", None)]
    sources["grammar"].news += [("one", None), ("all", None), ("stranger", None)]
    assert readiness.has_ready and list(readiness.poll()) == [("one", None)]
    assert readiness.missing("all") == {"adapter"} and not readiness.has_ready
    sources["adapter"].news += [("all", None)]
    assert list(readiness.poll()) == [("all", None)] and len(readiness) == 0


def test_the_first_failure_is_told_and_nothing_after_it(sources: dict[str, Source]) -> None:
    readiness = Readiness(sources)
    for name in ("fails", "ends"):
        readiness.wait_for(name, ["grammar", "adapter"])
    sources["adapter"].news += [("fails", FAILURE)]
    sources["grammar"].news += [("fails", None), ("ends", None)]
    assert list(readiness.poll()) == [("fails", FAILURE)] and readiness.missing("ends") == {"adapter"}
    readiness.forget("ends")
    sources["adapter"].news += [("ends", None), ("fails", None)]
    assert list(readiness.poll()) == [] and len(readiness) == 0
    assert all(source.forgotten == ["ends"] for source in sources.values())


def test_a_condition_that_nothing_tells_of_is_refused(sources: dict[str, Source]) -> None:
    with pytest.raises(ValueError, match="images"):
        Readiness(sources).wait_for("one", ["kv", "images"])


def test_it_waits_for_the_work_of_any_source(sources: dict[str, Source]) -> None:
    readiness, done = Readiness(sources), Future[None]()
    done.set_result(None)
    sources["grammar"].futures, sources["kv"].futures = [Future()], [done]
    readiness.wait()
    sources["kv"].futures = []
    readiness.wait([done])
