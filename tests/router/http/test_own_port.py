"""A port for each router: a scrape finds the router that it asks for."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from router.api import create_metrics_app
from router.config import RouterConfig
from router.http import own_port
from router.http.listener import bind
from router.http.own_port import OwnPort
from router.metrics.metrics import Metrics
from router.models import Models

LOOPBACK = "127.0.0.1"
Make = Callable[..., Any]


@pytest.fixture
def first() -> int:
    """A port from which on some are free: the kernel gives it to nobody else while the test begins."""
    with bind(LOOPBACK, 0) as free:
        port: int = free.getsockname()[1]
    return min(port, 65535 - own_port.MAX_PORTS_TRIED)


def models(make_service: Make, router: str, **settings: Any) -> Models:
    config = RouterConfig(**settings)
    metrics = Metrics(router)
    return Models([make_service(metrics, config=config)], metrics, config)


@contextlib.asynccontextmanager
async def running(one: Models, first: int) -> AsyncIterator[OwnPort]:
    port = OwnPort(create_metrics_app(one), LOOPBACK, first, one.config)
    one.alongside(port.start, port.close)
    await one.start()
    try:
        yield port
    finally:
        await one.close()


async def get(port: OwnPort, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.get(f"http://{LOOPBACK}:{port.port}{path}", headers=headers)


def test_each_router_answers_for_itself(make_service: Make, first: int) -> None:
    async def run() -> None:
        a, b = models(make_service, "a"), models(make_service, "b")
        a.services[0].metrics.ended("stop")
        async with running(a, first) as of_a, running(b, first) as of_b:
            assert of_a.port is not None and of_b.port is not None and first <= of_a.port < of_b.port
            for _ in range(3):
                assert (
                    'shoal_sequences_total{finish_reason="stop",model="tiny",router="a"} 1.0'
                    in (await get(of_a, "/metrics")).text
                )
                assert 'router="a"' not in (await get(of_b, "/metrics")).text
            assert (await get(of_a, "/ready")).status_code == 503  # it has no replica
            assert (await get(of_a, "/health")).status_code == 200
            assert (await get(of_a, "/v1/models")).status_code == 404
            port = of_a.port
        with bind(LOOPBACK, port, shared=False):  # it is free again
            pass

    asyncio.run(run())


def test_it_asks_for_keys_where_metrics_do(make_service: Make, first: int) -> None:
    async def run() -> None:
        closed = models(make_service, "a", api_key="k", require_auth_for_metrics_endpoint=True)
        async with running(closed, first) as port:
            assert (await get(port, "/metrics")).status_code == 401
            assert (await get(port, "/metrics", Authorization="Bearer k")).status_code == 200
            assert (await get(port, "/health")).status_code == 200

    asyncio.run(run())


def test_a_router_without_a_port_goes_on(
    make_service: Make, first: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_port, "MAX_PORTS_TRIED", 1)

    async def run(host: str) -> None:
        with socket.socket() as other:
            other.bind((LOOPBACK, first))
            other.listen()
            one = models(make_service, "a")
            port = OwnPort(create_metrics_app(one), host, first, one.config)
            one.alongside(port.start, port.close)
            await one.start()
            assert port.port is None
            await one.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run(LOOPBACK))
        asyncio.run(run("192.0.2.99"))  # not this machine's
    assert ["none of the" in line for line in caplog.messages] == [True, False]
