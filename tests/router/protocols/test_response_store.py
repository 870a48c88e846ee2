"""The store of responses: what is found again, by which tenant, for how long, and by other routers."""

import multiprocessing
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from router.protocols.response_store import FILE, STALE_S, ResponseStore, StoredResponse
from router.protocols.responses_objects import (
    AnsweredText,
    MessageItem,
    ReasoningSettings,
    ResponseObject,
    Status,
    TextSettings,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> ResponseStore:
    return ResponseStore(tmp_path, 1 << 20, 3600.0, clock)


def stored(name: str, previous: str | None = None, status: Status = "completed", text: str = "yes") -> StoredResponse:
    said = MessageItem(id=f"msg_{name}", status="completed", content=[AnsweredText(text=text)])
    response = ResponseObject(
        id=name, created_at=1, status=status, background=True, instructions=None, max_output_tokens=None, metadata={},
        model="m", output=[said], parallel_tool_calls=True, previous_response_id=previous, prompt_cache_key=None,
        reasoning=ReasoningSettings(), safety_identifier=None, store=True, temperature=1.0,
        text=TextSettings(format={"type": "text"}), tool_choice="auto", tools=[], top_logprobs=0, top_p=1.0,
        truncation="disabled", user=None,
    )  # fmt: skip
    return StoredResponse(response, [{"type": "message", "role": "user", "content": "x", "id": f"in_{name}"}])


def test_put_get_delete(store: ResponseStore, tmp_path: Path) -> None:
    made = stored("a")
    store.put("t", made)
    assert store.get("t", "a") == made
    assert [item["id"] for item in made.items] == ["in_a", "msg_a"]
    assert store.items("t", ["msg_a", "in_a", "none", "\ud800"]).keys() == {"in_a", "msg_a"}
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert store.delete("t", "a") and not store.delete("t", "a")
    assert store.get("t", "a") is None and store.items("t", ["msg_a"]) == {}
    assert store.get("t", "\ud800") is None and not store.delete("t", "\ud800")


def test_tenants_do_not_see_each_others(store: ResponseStore) -> None:
    store.put("t", stored("a"))
    assert store.get("u", "a") is None and store.chain("u", "a") is None
    assert not store.delete("u", "a") and store.items("u", ["msg_a"]) == {}
    assert store.get("t", "a") is not None


def test_a_chain_is_whole_or_not_there(store: ResponseStore) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put("t", stored(name, previous))
    chain = store.chain("t", "c")
    assert chain is not None and [each.response.id for each in chain] == ["a", "b", "c"]
    store.delete("t", "a")
    assert store.chain("t", "c") is None and store.get("t", "c") is not None


def test_age(store: ResponseStore, clock: Clock) -> None:
    store.put("t", stored("a"))
    store.put("t", stored("b"))
    clock.now += 3000
    assert store.chain("t", "b") is not None  # used again
    clock.now += 1000
    assert store.get("t", "a") is None and store.get("t", "b") is not None
    store.put("t", stored("c"))
    assert list(store._database.execute("SELECT id FROM responses ORDER BY id")) == [("b",), ("c",)]


def test_bytes(tmp_path: Path, clock: Clock) -> None:
    store = ResponseStore(tmp_path, 40_000, 3600.0, clock)
    for number in range(20):
        store.put("t", stored(str(number), text="x" * 9000))
        assert store.chain("t", "0") is not None  # used again and again, so it stays
    left = [number for number in range(20) if store.get("t", str(number)) is not None]
    assert left == [0, 17, 18, 19]
    store.put("t", stored("large", text="x" * 50_000))
    assert store.get("t", "large") is None
    assert (tmp_path / FILE).stat().st_size < 200_000


def test_what_has_ended_stays_so(store: ResponseStore) -> None:
    store.put("t", stored("a", status="in_progress"))
    store.put("t", stored("a", status="cancelled"), new=False)
    store.put("t", stored("a", status="completed"), new=False)
    assert not store.beat("a", "in_progress")
    found = store.get("t", "a")
    assert found is not None and found.response.status == "cancelled"
    store.put("t", stored("never"), new=False)
    assert store.get("t", "never") is None


def test_events_and_beats(store: ResponseStore, clock: Clock) -> None:
    store.put("t", stored("a", status="queued"))
    for number in range(4):
        clock.now += STALE_S / 2
        assert store.beat("a", "in_progress", [(number, b"x" * 100)])
    assert [number for number, _ in store.events("a", 0, 2)] == [1, 2]
    found = store.get("t", "a")
    assert found is not None and found.response.status == "in_progress" and not found.has_ended
    clock.now += STALE_S + 1
    found = store.get("t", "a")
    assert found is not None and found.response.status == "failed" and found.response.error is not None
    assert store.get("t", "a") == found and not store.beat("a", "in_progress")
    store.delete("t", "a")
    assert store.events("a", -1, 9) == []


def _write(folder: Path, name: str, count: int) -> None:
    store = ResponseStore(folder, 1 << 30, 3600.0)
    for number in range(count):
        store.put("t", stored(f"{name}{number}"))
    store.close()


def test_two_processes_share_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, name, 40)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    store = ResponseStore(tmp_path, 1 << 30, 3600.0)
    assert all(store.get("t", f"{name}{number}") is not None for name in "ab" for number in range(40))


def test_a_store_that_was_closed_is_there_again(tmp_path: Path) -> None:
    _write(tmp_path, "a", 1)
    made: Callable[[], ResponseStore] = lambda: ResponseStore(tmp_path, 1 << 20, 3600.0)  # noqa: E731
    assert made().get("t", "a0") is not None and made().get("t", "a0") is not None
