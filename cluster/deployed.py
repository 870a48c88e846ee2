"""The application as Ray Serve has it: how many replicas it keeps of each deployment."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import ray
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

APP = "shoal"  # the application's name in Serve
# Between two looks of `watch_targets`. Serve's controller takes some milliseconds to answer, and each router asks.
WATCH_S = 5.0


def scale(deployment: str, number: int) -> None:
    """Tells Serve another number of replicas for one of the application's deployments. Those that run, and go on, are
    not touched."""
    client = _get_global_client()
    assert client is not None, "the application runs"
    ray.get(client._controller.update_deployment_replicas.remote(DeploymentID(deployment, APP), number))


def targets() -> dict[str, int]:
    """How many replicas Serve should keep of each deployment. Raises KeyError if the application is not there."""
    client = _get_global_client()
    assert client is not None, "Serve runs"
    deployments = client.get_serve_details()["applications"][APP]["deployments"]
    return {name: deployment["target_num_replicas"] for name, deployment in deployments.items()}


def watch_targets(told: Mapping[str, Callable[[int], None]]) -> asyncio.Task[None]:
    """Calls `told`, by the names of deployments, with how many replicas Serve should keep of each: soon, and every
    `WATCH_S`, in this event loop, until the task is cancelled.

    What Serve pushes to its handles is the number of the deployed configuration, which `scale` does not change.
    """
    return asyncio.create_task(_watch(told))


async def _watch(told: Mapping[str, Callable[[int], None]]) -> None:
    while True:
        with contextlib.suppress(RayError, RayServeException, KeyError):  # Serve starts again
            numbers = await asyncio.to_thread(targets)
            for name, tell in told.items():
                tell(numbers[name])
        await asyncio.sleep(WATCH_S)
