"""The Serve application: routers in front, replicas behind, the same from every way of starting but for who listens.

`build` is what `serve run cluster.app:build` and a RayService's `import_path` name; its arguments are the keys of the
configuration. There Serve's proxies listen, on every node that takes part, and pass requests on to the routers.
`shoal serve` calls `application` itself, for routers that listen on its own machine: every token that passes Serve's
Python proxy costs more there than in the router.
"""

import logging
import re
import uuid
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster.config import Config, load
from cluster.models import resolve
from cluster.replica import CONTROL_CPUS, Replica, bundles
from cluster.request_router import ServePlacer, listen
from router.api import create_app
from router.defaults import SamplingDefaults
from router.fleet import Fleet
from router.listener import Listener
from router.metrics import Metrics
from router.replicas import Replicas
from router.service import Service
from router.tokenizer import Tokenizer

log = logging.getLogger(__name__)

APP = "shoal"  # the application's name in Serve
UNLIMITED = 1 << 20  # requests that Serve lets through at once: admission is the scheduler's, in tokens
DRAIN_S = 20.0  # what the streams of a router that is taken away get to finish
PLACEMENT = RequestRouterConfig(
    request_router_class="cluster.request_router:PlacementRouter"  # type: ignore[arg-type]  # their mistake
)
NODE_SHARE = 0.001  # of the resource that stands for a node: whoever asks for any of it runs there


def build(args: dict[str, Any]) -> Application:
    """The application for a configuration's keys. Raises ConfigError. Ray must be running: it knows the GPUs."""
    config, _ = settle(load(overrides=args), gpus=ray.cluster_resources().get("GPU", 0))
    return application(config)


def settle(config: Config, gpus: float) -> tuple[Config, str | None]:
    """Fills in what depends on the cluster, so that all processes agree, and what there is to say about it."""
    note = None
    device = config.device
    if device == "auto":
        device = "cuda" if gpus > 0 else "cpu"
        note = None if gpus > 0 else "no GPU here: the model runs on CPUs"
    name = config.served_model_name or model_name(config.model)
    return config.model_copy(update={"device": device, "served_model_name": name}), note


def model_name(model: str) -> str:
    """A hub id as it is; of a path the last part."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not Path(model).exists():
        return model
    path = Path(model).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def application(config: Config, node: str | None = None) -> Application:
    """With a `node` (its address in Ray) the routers run on that machine and listen on `host` and `port` themselves;
    without one they are behind Serve's proxies, and run anywhere. Raises nothing: `config` is settled."""
    replicas = serve.deployment(
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": CONTROL_CPUS},
        placement_group_bundles=bundles(config),
        placement_group_strategy="PACK",
        request_router_config=PLACEMENT,
        health_check_period_s=config.health_check_period_s,
        graceful_shutdown_wait_loop_s=0.1,  # nothing runs in the control actor
        graceful_shutdown_timeout_s=1.0,
    )(Replica).bind(config)
    return routers(config, replicas, node)


def routers(config: Config, replicas: Application, node: str | None = None) -> Application:
    """The routers of `application`, in front of a deployment that publishes what `Replica` does."""
    actor: dict[str, Any] = {"num_cpus": config.cpus_per_router}
    if node is not None:
        actor["resources"] = {f"node:{node}": NODE_SHARE}
    return serve.deployment(
        name="Router",
        num_replicas=config.num_routers,
        ray_actor_options=actor,
        max_ongoing_requests=UNLIMITED,
        health_check_period_s=config.health_check_period_s,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=DRAIN_S + 1.0,
    )(Router if node is None else ListeningRouter).bind(config, replicas)


class _Router:
    """One process of routing: OpenAI's API, this process's view of the fleet, and its connections to the replicas."""

    def __init__(self, config: Config, handle: DeploymentHandle) -> None:
        self._config = config
        fleet = Fleet(config.placement)
        metrics = Metrics(config.replicas, router=uuid.uuid4().hex[:8] if config.num_routers > 1 else "")
        replicas = Replicas(fleet, metrics)
        folder = resolve(config.model, weights=config.load_format != "dummy")
        defaults = SamplingDefaults.read(folder, config.sampling_defaults)
        for problem in defaults.problems:
            log.warning("%s", problem)
        self._service = Service(
            Tokenizer.from_folder(folder),
            replicas,
            ServePlacer(handle, fleet, replicas, config.replica_wait_s),
            fleet,
            metrics,
            model=config.served_model_name or model_name(config.model),
            context_length=config.context_length or UNLIMITED,
            defaults=defaults,
        )
        listen(self._take)

    def _take(self, replicas: dict[str, dict[str, Any]]) -> None:
        """What Serve says of the replicas that run: id to what each published (`Replica.record_replica_metadata`)."""
        if replicas:
            self._service.context_length = min(replica["context_length"] for replica in replicas.values())
        self._service.replicas.set_replicas({name: replica["address"] for name, replica in replicas.items()})


@serve.ingress()
class Router(_Router):
    """A router behind Serve's proxies."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service, self._config)


class ListeningRouter(_Router):
    """A router that listens itself, on the port that it shares with the other routers of its machine."""

    async def __init__(self, config: Config, handle: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        super().__init__(config, handle)
        self._listener = Listener(create_app(self._service, config), config.host, config.port, DRAIN_S)
        await self._service.start()
        await self._listener.start()

    def check_health(self) -> None:
        """Raises RuntimeError once nobody listens any more."""
        if not self._listener.alive:
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Serve calls it when it takes the router away, and waits for it."""
        await self._listener.close()
        await self._service.close()
