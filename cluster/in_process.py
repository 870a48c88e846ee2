"""A whole server in a program's own process, without Ray and without HTTP sockets.

    the program ── transport ──▶ router (an event loop in a thread) ──ZeroMQ──▶ replica (a child process)

The router is the same code as under `shoal serve`: the same bodies, checks, errors and answers. The replica has a
process of its own, so that its Python and the program's do not take turns.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from cluster.config import Config, ConfigError, load
from cluster.models import resolve, with_draft_folder
from cluster.replica_process import ReplicaProcess
from cluster.service import open_models, open_service
from router.api import create_app
from router.fleet.fleet import Fleet
from router.http.asgi_transport import AsgiTransport
from router.metrics.metrics import Metrics
from router.programs import Home
from router.replicas.replicas import Replicas
from router.wire.errors import NoReplica
from worker.config import WorkerConfig
from worker.curve import SECRET_BYTES

Answer = TypeVar("Answer")

# The settings, besides a replica's, that mean something without HTTP connections, Ray and other replicas.
OTHER_SETTINGS = (
    "served_model_name",
    "max_body_bytes",
    "max_prompts",
    "clamp_max_tokens",
    "max_priority",
    "sampling_defaults",
    "pooling",
    "scoring",
    "replica_wait_s",
    "start_timeout_s",
    "allow_runtime_lora_updating",
)
SETTINGS = (*WorkerConfig.model_fields, *OTHER_SETTINGS)
# There is one client, and the queue is its own: unlike a server, it need not be protected from the requests of others.
MAX_WAITING = 1 << 16
REPLICA = "0"  # the id of the only replica
RETRY_S = 0.1  # between looks at a replica that is not connected


class Ended(RuntimeError):
    """The server in this process was closed, or belongs to another process. The message is for the user as it
    stands."""


def configured(model: str, settings: Mapping[str, Any]) -> Config:
    """The configuration of a server in this process; `settings` are by the names of `Config`. Raises ConfigError."""
    if others := [name for name in settings if name in Config.model_fields and name not in SETTINGS]:
        raise ConfigError(f"{', '.join(others)}: for `shoal serve` only; an Engine has one replica and no HTTP server")
    unlimited = {"max_waiting": MAX_WAITING, "max_waiting_tokens": 1 << 62, "max_held_bytes": 1 << 62}
    return load(overrides={**unlimited, **settings, "model": model})


class OneReplicaPlacer:
    """A `router.service.Placer` for a replica that no other replaces. `ended`: why the replica's process has ended."""

    def __init__(self, fleet: Fleet, replicas: Replicas, wait_s: float) -> None:
        """`wait_s`: how long, in seconds, a request waits while the replica does not answer."""
        self._fleet = fleet
        self._replicas = replicas
        self._wait_s = wait_s
        self.ended: str | None = None

    async def place(
        self,
        request_id: str,
        prompt_ids: list[int],
        exclude: Collection[str],
        refused: Collection[str] = (),
        home: Home | None = None,
        output_limit: int | None = None,
    ) -> str:
        """See `Placer.place`. Raises NoReplica at once when the replica has ended or refused the request."""
        deadline = time.monotonic() + self._wait_s
        while self.ended is None and not refused and time.monotonic() <= deadline:
            if ready := self._replicas.ready:
                return self._fleet.place(request_id, prompt_ids, ready, output_limit=output_limit).replica_id
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._replicas.changed()
        raise NoReplica(self.ended or f"The replica does not answer; replica_wait_s is {self._wait_s:g}.")


class InProcessServer:
    """A router and a replica for one model. `model` is its name in the API. `transport` reaches the router from any
    event loop."""

    def __init__(self, config: Config) -> None:
        """Gets the model if it is missing, and starts the replica. Raises ModelError, ReplicaEnded, and ValueError for
        a broken file of the model."""
        folder = resolve(config.model, weights=config.load_format != "dummy", dequantize=config.dequantize)
        (named,) = config.deployments
        self.config = deployment = with_draft_folder(named.model_copy(update={"model": str(folder)}))
        metrics = Metrics()
        secret = os.urandom(SECRET_BYTES)

        def make_placer(fleet: Fleet, replicas: Replicas) -> OneReplicaPlacer:
            self._placer = OneReplicaPlacer(fleet, replicas, deployment.replica_wait_s)
            return self._placer

        self._service = open_service(deployment, folder, metrics, make_placer, secret)
        self._models = open_models(config, {deployment.name: self._service}, metrics)
        self.model = self._service.model
        self.transport = AsgiTransport(create_app(self._models), self.submit)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # garbage collection may close the server while its thread is in `submit`
        self._closed = False
        self._running: set[asyncio.Task[Any]] = set()  # what was submitted and has not ended
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)
        self._thread.start()
        self._replica = ReplicaProcess(deployment, secret, self._lose)
        try:
            self._connect(self._replica.wait(config.start_timeout_s))
        except BaseException:
            self.close()
            raise

    def submit(self, work: Coroutine[Any, Any, Answer]) -> "Future[Answer]":
        """Runs `work` in the router's event loop. May be called from any thread. Raises Ended."""
        if os.getpid() != self._pid:
            work.close()
            raise Ended("an Engine cannot be used in a fork of its process: make another one there")
        with self._lock:
            if self._closed:
                work.close()
                raise Ended("the Engine is closed")
            return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    def close(self) -> None:
        """Ends everything. Requests in flight fail. Does nothing in a fork of the process, or the second time."""
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is self._thread:  # garbage collection; the thread cannot wait for itself
            threading.Thread(target=self.close).start()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        finally:
            self._replica.close()

    def _connect(self, replica: dict[str, Any]) -> None:
        self._service.context_length = replica["context_length"]
        self._service.metrics.attention[REPLICA] = replica["attention"]
        self._service.replicas.set_replicas({REPLICA: replica["address"]})
        self.submit(self._models.start()).result()

    def _lose(self, reason: str) -> None:
        self._placer.ended = reason
        self._service.replicas.set_replicas({})

    async def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        finally:
            self._running.discard(task)

    async def _end(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._models.close()
