"""The application as Ray Serve has it: how many replicas it keeps of each deployment, and whether it ends."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

APP = "shoal"  # the application's name in Serve
ROUTER = "Router"  # the name of the routers' deployment
# Between two looks of `watch`. Serve's controller takes some milliseconds to answer, and each router asks.
WATCH_S = 5.0
# How long Serve lets a router that a change takes away go on with its streams. Serve wants a number: this is longer
# than any stream. What ends earlier, because the server or a machine does, ends its streams itself.
STREAMS_S = 7 * 24 * 3600.0
# How long before a machine goes the streams of its routers end: they tell their clients, and Serve takes its time.
GOODBYE_S = 20.0


def scale(deployment: str, number: int) -> None:
    """Tells Serve another number of replicas for one of the application's deployments. Those that run, and go on, are
    not touched."""
    client = _get_global_client()
    assert client is not None, "the application runs"
    ray.get(client._controller.update_deployment_replicas.remote(DeploymentID(deployment, APP), number))


def targets() -> dict[str, int]:
    """How many replicas Serve should keep of each deployment. Raises KeyError if the application is not there."""
    return _targets(details())


def details() -> dict[str, Any]:
    """Returns all that Serve tells of the application. Raises KeyError if it is not there."""
    client = _get_global_client()
    assert client is not None, "Serve runs"
    found: dict[str, Any] = client.get_serve_details()["applications"][APP]
    return found


def _targets(application: Mapping[str, Any]) -> dict[str, int]:
    return {name: deployment["target_num_replicas"] for name, deployment in application["deployments"].items()}


def node_s() -> float | None:
    """How many seconds this machine still has, if Ray was told that it goes; else None."""
    context = ray.get_runtime_context()
    deadline_ms = GcsClient(address=context.gcs_address).get_draining_nodes().get(context.get_node_id())
    return None if deadline_ms is None else deadline_ms / 1000 - time.time()


def watch(told: Mapping[str, Callable[[int], None]], drain_s: float, end: Callable[[], None]) -> asyncio.Task[None]:
    """Looks soon, and every `WATCH_S`, in this event loop, until the task is cancelled.

    Calls `told`, by the names of deployments, with how many replicas Serve should keep of each. What Serve pushes to
    its handles is the number of the deployed configuration, which `scale` does not change.

    Calls `end` once, when no stream may go on here: `drain_s` after Serve was told to delete the application, so that
    the whole server ends; or `GOODBYE_S` before this machine goes.
    """
    return asyncio.create_task(_watch(told, drain_s, end))


async def _watch(told: Mapping[str, Callable[[int], None]], drain_s: float, end: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    while True:
        left_s = None
        with contextlib.suppress(RayError, RayServeException, KeyError):  # Serve starts again
            application = await asyncio.to_thread(details)
            if application["status"] == ApplicationStatus.DELETING:
                left_s = drain_s
            numbers = _targets(application)
            for name, tell in told.items():
                tell(numbers[name])
        with contextlib.suppress(RayError):
            node_left_s = await asyncio.to_thread(node_s)
            if node_left_s is not None and node_left_s < STREAMS_S:
                left_s = min(drain_s if left_s is None else left_s, max(0.0, node_left_s - GOODBYE_S))
        if left_s is not None and timer is None:
            timer = loop.call_later(left_s, end)
        await asyncio.sleep(WATCH_S)
