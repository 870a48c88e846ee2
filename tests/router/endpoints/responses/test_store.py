"""The store of responses: what is found again, by which tenant, for how long, and by other routers."""

import contextlib
import multiprocessing
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from router.endpoints.responses.store import (
    EVENTS_BYTES,
    FILE,
    STALE_S,
    Position,
    ResponseStore,
    StoredResponse,
    StoreFull,
    TooLarge,
)
from router.wire.responses_objects import (
    AnsweredText,
    MessageItem,
    ReasoningSettings,
    ResponseObject,
    Status,
    TextSettings,
)

MOST = 1 << 30


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
def beats() -> Clock:
    """The machine's, which nobody sets."""
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock, beats: Clock) -> ResponseStore:
    return ResponseStore(tmp_path, 1 << 20, 3600.0, clock, beats)


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
    assert made.ids == ["in_a", "msg_a"]
    assert store.items("t", ["msg_a", "in_a", "none", "\ud800"], MOST).keys() == {"in_a", "msg_a"}
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert store.delete("t", "a") and not store.delete("t", "a")
    assert store.get("t", "a") is None and store.items("t", ["msg_a"], MOST) == {}
    assert store.get("t", "\ud800") is None and not store.delete("t", "\ud800")


def test_tenants_do_not_see_each_others(store: ResponseStore) -> None:
    store.put("t", stored("a"))
    assert store.get("u", "a") is None and store.chain("u", "a", MOST) is None
    assert not store.delete("u", "a") and store.items("u", ["msg_a"], MOST) == {}
    assert store.get("t", "a") is not None


def test_a_chain_is_whole_or_not_there(store: ResponseStore) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.put("t", stored(name, previous))
    chain = store.chain("t", "c", MOST)
    assert chain is not None and chain.ids == ["a", "b", "c"] and chain.status == "completed"
    assert [item["id"] for item in chain.items] == ["in_a", "msg_a", "in_b", "msg_b", "in_c", "msg_c"]
    with pytest.raises(TooLarge) as caught:
        store.chain("t", "c", chain.num_bytes - 1)
    assert caught.value.num_bytes == chain.num_bytes
    store.delete("t", "a")
    assert store.chain("t", "c", MOST) is None and store.get("t", "c") is not None


def test_age(store: ResponseStore, clock: Clock) -> None:
    store.put("t", stored("a"))
    store.put("t", stored("b"))
    clock.now += 3000
    store.touch(["b"])
    clock.now += 1000
    assert store.get("t", "a") is None and store.get("t", "b") is not None
    store.put("t", stored("c"))
    assert list(store._database.execute("SELECT id FROM responses ORDER BY id")) == [("b",), ("c",)]


def test_bytes(tmp_path: Path, clock: Clock) -> None:
    store = ResponseStore(tmp_path, 52_000, 3600.0, clock)
    for number in range(20):
        store.put("t", stored(str(number), text="x" * 9000))
        store.touch(["0"])  # again and again, so it stays
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


def test_events_and_beats(store: ResponseStore, beats: Clock) -> None:
    store.put("t", stored("a", status="queued"))
    for number in range(4):
        beats.now += STALE_S / 2
        assert store.beat("a", "in_progress", [(number, b"x" * 100)])
    assert [number for number, _ in store.events("a", 0, 2)] == [1, 2]
    assert store.position("t", "a") == Position("in_progress", 3) and store.position("u", "a") is None
    found = store.get("t", "a")
    assert found is not None and found.response.status == "in_progress" and not found.has_ended
    beats.now += STALE_S + 1
    found = store.get("t", "a")
    assert found is not None and found.response.status == "failed" and found.response.error is not None
    assert store.get("t", "a") == found and not store.beat("a", "in_progress")
    store.put("t", stored("b", status="queued"))
    assert store.events("b", -1, 9) == [] and store.position("t", "b") == Position("queued", -1)
    store.delete("t", "a")
    assert store.events("a", -1, 9) == []


def test_events_are_read_in_parts(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, MOST, 3600.0)
    store.put("t", stored("a", status="queued"))
    for number, part in enumerate((0.5, 0.4, 0.2, 3, 0.1)):
        store.beat("a", "in_progress", [(number, b"x" * int(part * EVENTS_BYTES))])
    assert [len(store.events("a", after, 512)) for after in (-1, 1, 2, 3, 4)] == [3, 2, 1, 1, 0]


@pytest.mark.parametrize("jump_s", [31.0, -1000.0, 3601.0, 1e9])
def test_a_clock_that_is_set_ends_nothing_that_runs(store: ResponseStore, clock: Clock, jump_s: float) -> None:
    store.put("t", stored("a", status="queued"))
    assert store.beat("a", "in_progress")
    clock.now += jump_s
    store.put("t", stored("b"))  # forgets what is too old
    found = store.get("t", "a")
    assert found is not None and found.response.status == "in_progress"
    assert store.beat("a", "in_progress")


def test_what_ran_when_the_machine_was_started_again_has_failed(tmp_path: Path) -> None:
    """Whatever the clock of the new start says."""
    for boot, now in (("one", 5e6), ("other", 7.0)):
        store = ResponseStore(tmp_path, 1 << 20, 3600.0, beats=lambda now=now: now, boot=boot)  # type: ignore[misc]
        if boot == "one":
            store.put("t", stored("a", status="in_progress"))
        else:
            found = store.get("t", "a")
            assert found is not None and found.response.status == "failed" and not store.beat("a", "in_progress")


# ---------------------------------------------------------------- shares


def test_a_tenant_that_stores_much_forgets_its_own(store: ResponseStore) -> None:
    for number in range(5):
        store.put("victim", stored(f"v{number}"))
    store.put("victim", stored("running", status="in_progress"))
    for number in range(40):
        store.put("attacker", stored(f"a{number}", text="x" * 60_000))
    assert all(store.get("victim", f"v{number}") is not None for number in range(5))
    assert store.beat("running", "in_progress")
    left = [number for number in range(40) if store.get("attacker", f"a{number}") is not None]
    assert left == list(range(left[0], 40)) and 10 < len(left) < 20  # the last ones, and not fewer than fit


def test_many_tenants_have_a_share_each(store: ResponseStore) -> None:
    for tenant in range(8):
        for number in range(20):
            store.put(f"t{tenant}", stored(f"{tenant}-{number}", text="x" * 20_000))
    left = [sum(store.get(f"t{t}", f"{t}-{n}") is not None for n in range(20)) for t in range(8)]
    assert max(left) - min(left) <= 1 and sum(left) > 38, left


def test_what_runs_is_never_forgotten_and_takes_half_of_all_at_most(store: ResponseStore, beats: Clock) -> None:
    store.put("other", stored("small"))
    large = 100_000
    taken = (1 << 19) // large
    for number in range(taken):
        store.put("t", stored(f"r{number}", status="in_progress", text="x" * large))
    with pytest.raises(StoreFull):
        store.put("t", stored(f"r{taken}", status="in_progress", text="x" * large))
    assert store.get("t", f"r{taken}") is None
    with pytest.raises(StoreFull):
        store.beat("r0", "in_progress", [(0, b"x" * large)])
    assert store.events("r0", -1, 9) == []
    for number in range(20):
        store.put("t", stored(f"e{number}", text="x" * large))
    assert all(store.beat(f"r{number}", "in_progress") for number in range(taken))
    assert store.get("other", "small") is not None
    beats.now += STALE_S + 1  # their router has ended: they no longer count, and are forgotten first
    store.put("t", stored("new", status="in_progress", text="x" * large))
    assert store.get("t", "r0") is None and store.get("other", "small") is not None


@pytest.mark.parametrize(
    ("responses", "items", "text"), [(20, 5000, "x"), (2000, 1, "x" * 700), (400, 1, "x" * 2000), (300, 1, "x" * 6000)]
)
def test_the_bytes_that_are_counted_are_those_of_the_file(
    tmp_path: Path, responses: int, items: int, text: str
) -> None:
    store = ResponseStore(tmp_path, MOST, 3600.0)
    for number in range(responses):
        name = f"resp_{number:032x}"
        made = stored(name, text=text)
        made.input[:] = [
            {"type": "message", "role": "user", "content": "x", "id": f"msg_{hash((number, item)):032x}"}
            for item in range(items)
        ]
        store.put("a-client", made)
    (counted,) = store._database.execute("SELECT sum(bytes) FROM tenants").fetchone()
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = (tmp_path / FILE).stat().st_size
    assert 0.75 < size / counted < 1.1, (size, counted)
    for number in range(responses):
        store.delete("a-client", f"resp_{number:032x}")
    assert store._database.execute("SELECT * FROM tenants").fetchall() == []
    store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert (tmp_path / FILE).stat().st_size < 100_000


def test_responses_of_the_layout_before_are_taken_over(tmp_path: Path, clock: Clock) -> None:
    before = tmp_path / "responses-1.sqlite3"
    with contextlib.closing(sqlite3.connect(before)) as file:
        file.execute(
            "CREATE TABLE responses (id TEXT PRIMARY KEY, tenant TEXT, previous TEXT, status TEXT, response BLOB, "
            "input BLOB, bytes INTEGER, used_s REAL, beat_s REAL) WITHOUT ROWID"
        )
        for made, used_s in ((stored("a"), 900.0), (stored("b", "a"), 950.0), (stored("c", status="queued"), 980.0)):
            response = msgspec.json.encode(made.response), msgspec.json.encode(made.input)
            row = (made.response.id, "t", made.response.previous_response_id, made.response.status, *response, 9)
            file.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)", (*row, used_s))
        file.execute("INSERT INTO responses VALUES ('d', 't', NULL, 'completed', x'00', x'00', 9, 990, 0)")
        file.commit()
    os.utime(before, (990, 990))
    ResponseStore(tmp_path, 1 << 20, 120.0, clock).close()
    assert before.exists()  # a router of the version before may write to it
    os.utime(before, (900, 900))
    store = ResponseStore(tmp_path, 1 << 20, 120.0, clock)
    assert store.get("t", "b") == stored("b", "a") and store.items("t", ["msg_a"], MOST).keys() == {"msg_a"}
    assert store.get("t", "c") is None and store.get("t", "d") is None and not before.exists()
    clock.now += 50  # ages go on
    assert store.get("t", "a") is None and store.get("t", "b") is not None


def test_references_to_items_are_bounded(store: ResponseStore) -> None:
    for number in range(3):
        store.put("t", stored(f"r{number}", text="x" * 1000))
    names = [f"msg_r{number}" for number in range(3)]
    assert len(store.items("t", names, 5000)) == 3
    with pytest.raises(TooLarge):
        store.items("t", names, 3000)


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
