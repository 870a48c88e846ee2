"""Everything but Ray in this process: the router's application behind uvicorn, and a replica with a tiny model, whose
messages go over ZeroMQ.
"""

import asyncio
import contextlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import uvicorn

import worker.engine.server
from router.api import create_app
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.http import connection
from router.http.connection import WaitingConnections, protocol
from router.metrics.metrics import Metrics
from router.models import Models
from router.prepare.defaults import SamplingDefaults
from router.replicas.replicas import Replicas
from router.service import Service
from router.text.tokenizer import Tokenizer
from tests.placer import DirectPlacer
from tests.plane import SECRET
from tests.quick_http import local_socket
from worker.config import WorkerConfig

WAIT_S = 60.0
CONTEXT = 320
MODEL = "tiny-llama"
KV_TOKENS = 2048


class Model:
    """A replica with a tiny model, in a thread of its own, and the service in front of it."""

    def __init__(self, name: str, folder: Path, metrics: Metrics, config: RouterConfig) -> None:
        settings = {"device": "cpu", "dtype": "float32", "kv_tokens": KV_TOKENS, "context_length": CONTEXT}
        limits = {"max_running": 24, "token_budget": 96, "cpu_threads": 1, "grammar_timeout_s": 5}
        self.replica = worker.engine.server.Server(
            folder, WorkerConfig.model_validate(settings | limits), secret=SECRET
        )
        self._thread = threading.Thread(target=self.replica.run, name="replica")
        self._thread.start()
        self.fleet = Fleet()
        self.links = Replicas(self.fleet, metrics.model(name), SECRET)
        self.links.set_replicas({"r0": self.replica.address})
        tokenizer = Tokenizer.from_folder(folder)
        self.service = Service(
            tokenizer,
            self.links,
            DirectPlacer(self.fleet, self.links, 0),
            self.fleet,
            metrics.model(name),
            model=name,
            context_length=CONTEXT,
            defaults=SamplingDefaults(),
            output_format=tokenizer.output_format("auto", "auto"),
            config=config,
        )

    def close(self) -> None:
        self.replica.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class Whole:
    """One router and a replica of each model, each in a thread of its own. What is said of a replica is said of the
    first model's. A model is named after its folder."""

    def __init__(self, responses: Path, folder: Path, *others: Path, **settings: Any) -> None:
        """`responses`: the folder of stored responses. `settings`: further ones of the router."""
        self.metrics = Metrics()
        config = RouterConfig(
            max_prompts=12, max_body_bytes=1 << 20, max_priority=(1 << 31) - 1, response_store_dir=responses, **settings
        )
        self._models = [Model(each.name, each, self.metrics, config) for each in (folder, *others)]
        first = self._models[0]
        self.replica, self.engine = first.replica, first.replica.engine
        self.fleet, self.links, self.service = first.fleet, first.links, first.service
        self.app = create_app(Models([model.service for model in self._models], self.metrics, config))
        made: Any = protocol(config, WaitingConnections())
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(self.app, http=made, log_level="critical", timeout_graceful_shutdown=5)
        )
        self._listening = local_socket()
        self.address: tuple[str, int] = self._listening.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self._loop: asyncio.AbstractEventLoop
        self._router_thread = threading.Thread(target=self._serve, name="router")
        self._router_thread.start()

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._uvicorn.serve(sockets=[self._listening])

        asyncio.run(serve())

    def close(self) -> None:
        self._uvicorn.should_exit = True
        self._router_thread.join(WAIT_S)
        assert not self._router_thread.is_alive()
        for model in self._models:
            model.close()

    # ------------------------------------------------ what is left

    def busy(self) -> dict[str, Any]:
        """What must be gone when nobody asks for anything any more, as far as it is there."""
        links = list(self.links._connections.values())
        everything = {
            "engine.scheduler": len(self.engine.scheduler),
            "engine.has_work": self.engine.has_work,
            "engine.readiness": len(self.engine.readiness),
            "replica._owners": dict(self.replica._owners),
            "fleet._booked": dict(self.fleet._booked),
            "fleet's view": [v for v in self.fleet.snapshot() if v.bookings or v.waiting_tokens or v.context_tokens],
            "streams": [link.streams for link in links if link.streams],
            "connections": len(self._uvicorn.server_state.connections),
            "requests": len(self._uvicorn.server_state.tasks),
        }
        return {name: what for name, what in everything.items() if what}

    def tasks(self) -> list[str]:
        """Of the router's event loop."""

        async def names() -> list[str]:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            return sorted(str(getattr(task.get_coro(), "__qualname__", task)) for task in others)

        return asyncio.run_coroutine_threadsafe(names(), self._loop).result(WAIT_S)

    def held(self) -> dict[str, Any]:
        """What stays the same, however many requests there were."""
        process = psutil.Process()
        names = [thread.name for thread in threading.enumerate()]  # pools, which grow up to a size, once each
        return {
            "tasks": self.tasks(),
            "threads": sorted({re.sub("_[0-9]+$", "", name) for name in names if "AnyIO" not in name}),
            "sockets and files": process.num_fds(),
            "children": len(process.children(recursive=True)),
        }

    def settled(self) -> None:
        """Waits until nothing goes on, then proves that every page is free or in the tree."""
        until(lambda: not self.busy(), self.busy)
        self.engine.check_integrity()
        tree = self.engine.tree
        assert tree.num_cached == tree.num_evictable
        assert tree.pool.num_free + tree.num_cached == KV_TOKENS // 16
        load = self.engine.load()
        assert (load.running, load.waiting, load.waiting_tokens, load.context_tokens) == (0, 0, 0, 0)
        view = self.fleet.snapshot()[0]
        assert (view.bookings, view.waiting_tokens, view.context_tokens) == (0, 0, 0)


def until(true: Callable[[], Any], what: Callable[[], Any]) -> None:
    """Polls: what is waited for is other threads' doing."""
    tick = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if true():
            return
        tick.wait(0.01)
    raise AssertionError(f"not within {WAIT_S} s: {what()}")


# Of tools the names alone, since every byte is a token.
TOOLS_TEMPLATE = "{% for tool in tools or [] %}<|start|>tool: {{ tool.function.name }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("whole")
    model = folder / tiny_model.name
    shutil.copytree(tiny_model, model)
    template = model / "chat_template.jinja"
    template.write_text(TOOLS_TEMPLATE + template.read_text())
    with serving(folder / "responses", model) as made:
        yield made


@contextlib.contextmanager
def serving(responses: Path, *folders: Path, **settings: Any) -> Iterator[Whole]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PROBE_AFTER_S", "PROBE_AGAIN_S", "PROBE_EVERY_S"):  # who has left is missed soon
            patch.setattr(connection, name, 0.02)
        made = Whole(responses, *folders, **settings)
        try:
            until(lambda: all(model.links.ready for model in made._models), lambda: "a replica is not connected")
            yield made
        finally:
            made.close()
            torch.set_num_threads(threads)


def parse_events(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream of server-sent events, without the end mark, which must be there."""
    lines = [line for line in body.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), body
    assert lines and (lines[-1] == "data: [DONE]" or "error" in json.loads(lines[-1][6:])), body
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
