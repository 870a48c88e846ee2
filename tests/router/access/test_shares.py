"""What a router holds for its clients is divided among them, and nothing is reserved by a claim alone."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from router import service as services
from router.access.key_file import ANYBODY
from router.access.shares import Shares
from router.config import RouterConfig
from router.http import memory
from router.http.body import MIN_BODY_BYTES, HeldBytes, read_sent
from router.wire.errors import ApiError

KEYS = "keys: [{key: a, name: a}, {key: b, name: b}]"
BODY = {"model": "tiny", "prompt": "x"}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture
def keyed(make_stack: Callable[..., Any], make_replica: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Makes a server of two clients, `a` and `b`."""
    (tmp_path / "keys").write_text(KEYS)
    return lambda **config: make_stack(make_replica(), config=RouterConfig(api_key_file=tmp_path / "keys", **config))


@contextlib.contextmanager
def begun(stack: Any, path: str, announced: int, sent: bytes, name: str) -> Iterator[socket.socket]:
    """A request of which only a part of the body is sent."""
    with socket.create_connection(stack.server.socket.getsockname()[:2], timeout=20) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {name}\r\nContent-Length: {announced}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        yield connection


def whole(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


# ---------------------------------------------------------------- shares


def test_one_client_leaves_room_for_others() -> None:
    shares = Shares(64)
    for client, most in (("a", 32), ("b", 16), ("c", 8)):
        for _ in range(most):
            assert shares.has_room(client, 1)
            shares.take(client, 1)
        assert not shares.has_room(client, 1)
    shares.give("a", 20)
    assert shares.has_room("c", 1) and shares.taken == 36


def test_where_nobody_can_be_told_apart_there_are_no_shares() -> None:
    shares = Shares(64)
    shares.take("", 60)
    assert shares.has_room("", 4) and not shares.has_room("", 5)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), max_size=60))
def test_there_is_always_room_for_who_has_nothing(asked: list[tuple[str, int]]) -> None:
    shares = Shares(1000)
    for client, units in asked:
        if shares.has_room(client, units):
            shares.take(client, units)
    assert shares.taken <= 1000 and shares.has_room("late", 1000 // 5 - 50)


# ---------------------------------------------------------------- bodies


def test_announced_bytes_keep_nobody_out(keyed: Callable[..., Any]) -> None:
    stack = keyed(max_held_bytes=10_000, max_body_bytes=4000)
    with contextlib.ExitStack() as held:
        for _ in range(20):
            held.enter_context(begun(stack, "/v1/completions", 4000, b"{", "a"))
        stack.until(lambda: stack.models._held.shares.taken == 20)
        for name in "ab":
            body = BODY | {"user": "u" * 3000}
            assert httpx.post(f"{stack.url}/v1/completions", json=body, headers=key(name)).status_code == 200
    stack.until(lambda: not stack.models._held.shares.taken)


def test_bytes_that_one_client_holds_keep_no_other_out(keyed: Callable[..., Any]) -> None:
    stack = keyed(max_held_bytes=10_000, max_body_bytes=4000)
    with contextlib.ExitStack() as held:
        for _ in range(5):
            held.enter_context(begun(stack, "/v1/completions", 1001, b" " * 1000, "a"))
        stack.until(lambda: stack.models._held.shares.taken == 5000)
        refused = httpx.post(f"{stack.url}/v1/completions", json=BODY | {"user": "u" * 900}, headers=key("a"))
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        unannounced = iter([b" " * 500, b" " * 500])
        refused = httpx.post(f"{stack.url}/v1/completions", content=unannounced, headers=key("a"))
        assert refused.status_code == 503
        body = BODY | {"user": "u" * 3000}
        assert httpx.post(f"{stack.url}/v1/completions", json=body, headers=key("b")).status_code == 200
    stack.until(lambda: not stack.models._held.shares.taken)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still but for `pass_s`."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    async def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        for _ in range(3):  # what is due is done
            await asyncio.sleep(0)


def read(pieces: list[tuple[float, bytes]], **limits: Any) -> int:
    """Reads a body, each piece of which comes after so many seconds. Returns its length, or a refusal's status."""
    loop, left = JumpingLoop(), iter(pieces)

    async def receive() -> dict[str, Any]:
        seconds, piece = next(left, (1e9, b""))
        await loop.pass_s(seconds)
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    async def run() -> int:
        request = Request({"type": "http", "headers": [], "client": None, "state": {"client": ANYBODY}}, receive)
        try:
            return len(await read_sent(request, RouterConfig(**limits), HeldBytes(1 << 20, lambda: 0.0)))
        except ApiError as error:
            return error.status

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


LIMITS = {"header_timeout_s": 10.0, "body_timeout_s": 60.0}


def test_a_body_that_comes_too_slowly() -> None:
    """Long before the time of a whole body is over."""
    assert read([(9.0, b"x" * (MIN_BODY_BYTES - 1)), (0.9, b""), (0.0, b"")], **LIMITS) == MIN_BODY_BYTES - 1
    assert read([(9.0, b"x" * (MIN_BODY_BYTES - 1)), (1.1, b"x"), (0.0, b"")], **LIMITS) == 408
    assert read([], **LIMITS) == 408
    steady = [(9.0, b"x" * MIN_BODY_BYTES)] * 6
    assert read([*steady, (0.0, b"")], **LIMITS) == 6 * MIN_BODY_BYTES
    assert read([*steady, (7.0, b"x" * MIN_BODY_BYTES), (0.0, b"")], **LIMITS) == 408


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/completions"])
def test_long_texts_of_one_client_keep_no_other_out(
    keyed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """And what nobody waits for any more is never begun."""
    monkeypatch.setattr(services, "SHORT_TEXT_BYTES", 50)
    monkeypatch.setattr(services, "LONG_TEXT_BYTES", 100)
    stack = keyed()
    said = {"messages": [{"role": "user", "content": "x" * 200}], "model": "tiny"}
    body = said if "messages" in path else {"model": "tiny", "prompt": "x" * 200}
    begins, ends = threading.Semaphore(0), threading.Event()
    began: list[str] = []
    encode = stack.tokenizer.encode

    def slow(tokenizer: Any, text: str, *more: Any, **options: Any) -> list[int]:
        who = "b" if "y" in text else "a"
        began.append(who)
        begins.release()
        assert who == "b" or ends.wait(20)
        return encode(text, *more, **options)

    monkeypatch.setattr(type(stack.tokenizer), "encode", slow)

    def ask(name: str) -> "Future[httpx.Response]":
        mine = json.loads(json.dumps(body).replace("xxx", "yyy")) if name == "b" else body
        return pool.submit(httpx.post, f"{stack.url}{path}", json=mine, headers=key(name), timeout=20)

    def waiting() -> int:
        return sum(map(len, stack.service._long_texts._lines.values()))

    with stack.pool() as pool, contextlib.ExitStack() as leaving:
        try:
            first = ask("a")
            assert begins.acquire(timeout=20)
            sent = json.dumps(body).encode()
            gone = [leaving.enter_context(begun(stack, path, len(sent), sent, "a")) for _ in range(10)]
            stack.until(lambda: waiting() == 10)
            assert ask("b").result(20).status_code == 200
            for connection in gone:
                connection.close()
            stack.until(lambda: not waiting())
        finally:
            ends.set()
        assert first.result(20).status_code == 200
    assert began == ["a", "b"]


def test_only_short_texts_are_read_by_the_event_loop(
    keyed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = keyed()
    encode = stack.tokenizer.encode
    threads: list[str] = []

    def noting(tokenizer: Any, text: str, *more: Any, **options: Any) -> list[int]:
        threads.append(threading.current_thread().name.partition("_")[0])
        return encode(text, *more, **options)

    monkeypatch.setattr(type(stack.tokenizer), "encode", noting)
    for size in (1000, services.SHORT_TEXT_BYTES, services.LONG_TEXT_BYTES):
        answer = httpx.post(f"{stack.url}/tokenize", json={"prompt": "x" * size}, headers=key("a"), timeout=20)
        assert answer.status_code == 200
    loop, short, long = threads
    assert len({loop, short, long}) == 3, threads
    threads.clear()  # a body of few bytes may ask for many sequences
    body = {"model": "tiny", "max_tokens": 1, "prompt": ["z"] * 9}
    assert httpx.post(f"{stack.url}/v1/completions", json=body, headers=key("a"), timeout=20).status_code == 200
    assert loop not in threads, threads


# ---------------------------------------------------------------- responses in the background


def test_one_client_does_not_take_all_slots_of_the_background(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(KEYS)
    config = RouterConfig(
        api_key_file=tmp_path / "keys", response_store_dir=tmp_path / "kept", max_background_responses=4
    )
    fake = make_replica().hold()
    stack = make_stack(fake, config=config)

    def begin(name: str) -> httpx.Response:
        body = {"model": "tiny", "input": "x", "background": True}
        return httpx.post(f"{stack.url}/v1/responses", json=body, headers=key(name))

    assert [begin(name).status_code for name in "aaab"] == [200, 200, 429, 200]
    assert begin("a").json()["error"]["code"] == "overloaded"
    fake.allow(None)


# ---------------------------------------------------------------- memory


def test_memory_of_large_bodies_is_given_back_once_after_a_burst(
    keyed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = keyed()
    trims = threading.Semaphore(0)
    monkeypatch.setattr(memory, "trim", trims.release)
    large = BODY | {"user": "u" * memory.LARGE_BYTES}
    monkeypatch.setattr(memory, "AFTER_S", 600)
    assert httpx.post(f"{stack.url}/tokenize", json={"prompt": "x"}, headers=key("a")).status_code == 200
    assert not stack.models._held.trim._is_due
    monkeypatch.setattr(memory, "AFTER_S", 0)
    assert httpx.post(f"{stack.url}/v1/completions", json=large, headers=key("a")).status_code == 200
    assert trims.acquire(timeout=20)
    monkeypatch.setattr(memory, "AFTER_S", 600)
    for _ in range(2):
        assert (
            httpx.post(f"{stack.url}/tokenize", content=b" " * memory.LARGE_BYTES, headers=key("a")).status_code == 400
        )
    stack.until(lambda: stack.models._held.trim._is_due)
    assert not trims.acquire(blocking=False)
