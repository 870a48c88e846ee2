"""The application without sockets, called from another event loop: as over HTTP."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from router.http.asgi_transport import MAX_UNREAD_BYTES, AsgiTransport

pytestmark = pytest.mark.anyio

BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 20, "seed": 1}


def client(stack: Any, app: Any = None) -> httpx.AsyncClient:
    """Calls the router's application, or another one, in the server's event loop."""

    def submit(work: Coroutine[Any, Any, None]) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(work, stack.server.loop)

    transport = AsgiTransport(app or stack.server.config.app, submit)
    return httpx.AsyncClient(transport=transport, base_url="http://here/v1", timeout=20)


async def test_answers_are_those_over_http(stack: Any) -> None:
    async with client(stack) as inside, httpx.AsyncClient(base_url=f"{stack.server.url}/v1") as outside:
        for method, path, body in (
            ("POST", "/completions", BODY),
            ("POST", "/completions", BODY | {"stream": True}),
            ("POST", "/completions", BODY | {"stop": 7}),
            ("GET", "/models", None),
            ("GET", "/nowhere?a=b", None),
        ):
            here, there = [await each.request(method, path, json=body) for each in (inside, outside)]
            assert here.status_code == there.status_code
            assert here.headers["content-type"] == there.headers["content-type"]
            assert _content(here) == _content(there)


def _content(answer: httpx.Response) -> Any:
    """The answer without what differs between two requests: ids, times, and how text is cut into pieces."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        choices = [json.loads(event)["choices"][0] for event in events]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"], done
    return {key: value for key, value in answer.json().items() if key not in ("id", "created")}


async def test_a_stream_comes_in_pieces(make_stack: Callable[..., Any], make_replica: Callable[..., Any]) -> None:
    fake = make_replica().hold()
    lines = []
    fake.allow(1)
    async with (
        client(make_stack(fake)) as inside,
        inside.stream("POST", "/completions", json=BODY | {"stream": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line:
                lines.append(line)
                fake.allow(1)  # without it, there would be no other line
    assert len(lines) > 10 and lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_that_leaves_ends_the_work(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], stream: bool
) -> None:
    fake = make_replica().hold()
    async with client(make_stack(fake)) as inside:
        asked = asyncio.ensure_future(inside.post("/completions", json=BODY | {"stream": stream}))
        name = (await asyncio.to_thread(fake.wait_for, fake.requests))[0].request_id
        asked.cancel()
        assert await asyncio.to_thread(fake.wait_for, fake.aborted) == [name]


async def test_a_stream_that_is_closed_early_ends_the_work(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any]
) -> None:
    fake = make_replica().hold()
    fake.allow(2)
    async with client(make_stack(fake)) as inside:
        async with inside.stream("POST", "/completions", json=BODY | {"stream": True}) as answer:
            async for _ in answer.aiter_lines():
                break
        assert len(await asyncio.to_thread(fake.wait_for, fake.aborted)) == 1


async def test_an_answer_that_is_not_read_waits(stack: Any) -> None:
    sent: list[int] = []
    waits = threading.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        asyncio.get_running_loop().call_soon(waits.set)  # runs when `send` has to wait
        for number in range(8):
            await send({"type": "http.response.body", "body": b"x" * (MAX_UNREAD_BYTES // 2), "more_body": number < 7})
            sent.append(number)

    async with client(stack, flood) as inside, inside.stream("GET", "/") as answer:
        await asyncio.to_thread(waits.wait)
        assert sent == [0, 1]
        assert len(await answer.aread()) == 4 * MAX_UNREAD_BYTES


async def test_an_application_that_ends_too_early_is_a_broken_connection(stack: Any) -> None:
    async def begins(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise asyncio.CancelledError

    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        raise asyncio.CancelledError

    for app in (begins, dies):
        async with client(stack, app) as inside:
            with pytest.raises(httpx.ReadError):
                await inside.get("/")


async def test_an_event_loop_that_has_ended_refuses_connections() -> None:
    def submit(work: Coroutine[Any, Any, None]) -> "Future[None]":
        work.close()
        raise RuntimeError("all is over")

    async with httpx.AsyncClient(transport=AsgiTransport(None, submit)) as inside:  # type: ignore[arg-type]
        with pytest.raises(httpx.ConnectError, match="all is over"):
            await inside.get("http://here/")


def test_a_caller_whose_event_loop_ends_is_gone(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any]
) -> None:
    fake = make_replica().hold()
    inside = client(make_stack(fake))
    fake.allow(1)

    async def begin() -> httpx.Response:
        request = inside.build_request("POST", "/completions", json=BODY | {"stream": True})
        return await inside.send(request, stream=True)

    answer = asyncio.run(begin())  # keeps the answer, but not the event loop
    fake.allow(2)
    assert len(fake.wait_for(fake.aborted)) == 1
    assert answer.status_code == 200
