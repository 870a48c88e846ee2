"""The Serve application: routers in front, replicas behind. The same for every way to start it, except for who listens.

- `build` is for `serve run cluster.app:build` and for a RayService's `import_path`; its arguments are the keys of the
  configuration. Serve's proxies listen, on every node that takes part, and pass requests on to the routers. A
  RayService sets the numbers of replicas and routers in its `deployments`, because Serve restarts all of them when an
  argument changes.
- `application` is for `shoal serve`, with routers that listen on its own machine: a token that passes Serve's Python
  proxy costs more there than in the router.
"""

from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster.config import Config, load
from cluster.models import model_name, resolve
from cluster.replica import CONTROL_CPUS, Replica, bundles
from cluster.request_router import ServePlacer, listen, watch_size
from cluster.service import open_service
from router.api import create_app
from router.listener import Listener
from worker.folders import cache_folder

APP = "shoal"  # the application's name in Serve
UNLIMITED = 1 << 20  # requests that Serve lets through at once: the scheduler does admission, in tokens
DRAIN_S = 20.0  # how long the streams of a removed router may take to finish
PLACEMENT = RequestRouterConfig(
    request_router_class="cluster.request_router:PlacementRouter"  # type: ignore[arg-type]  # Ray's annotation is wrong
)
NODE_SHARE = 0.001  # of the resource that stands for a node: an actor that asks for some of it runs there


def build(args: dict[str, Any]) -> Application:
    """The application for a configuration's keys. Raises ConfigError. Ray must be running: its GPUs decide the
    device."""
    config, _ = settle(load(overrides=args), gpus=ray.cluster_resources().get("GPU", 0))
    return application(config)


def settle(config: Config, gpus: float) -> tuple[Config, str | None]:
    """The configuration with everything filled in that depends on the cluster, so that all processes agree; and a note
    about it for the user, or None."""
    note = None
    device = config.device
    if device == "auto":
        device = "cuda" if gpus > 0 else "cpu"
        note = None if gpus > 0 else "no GPU here: the model runs on CPUs"
    name = config.served_model_name or model_name(config.model)
    return config.model_copy(update={"device": device, "served_model_name": name}), note


def application(config: Config, node: str | None = None) -> Application:
    """The application. With a `node` (its address in Ray) the routers run on that machine and listen on `host` and
    `port` themselves. Without one they run anywhere, behind Serve's proxies. `config` must be settled."""
    replicas = serve.deployment(
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": CONTROL_CPUS},
        placement_group_bundles=bundles(config),
        placement_group_strategy="PACK",
        request_router_config=PLACEMENT,
        health_check_period_s=config.health_check_period_s,
        graceful_shutdown_wait_loop_s=0.1,  # nothing runs in the control actor
        graceful_shutdown_timeout_s=1.0,
    )(Replica).bind(unscaled(config))
    return routers(config, replicas, node)


def routers(config: Config, replicas: Application, node: str | None = None) -> Application:
    """The routers of `application`, in front of a deployment that publishes the same metadata as `Replica`."""
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
    )(Router if node is None else ListeningRouter).bind(unscaled(config), replicas)


def unscaled(config: Config) -> Config:
    """The configuration without the numbers of replicas and routers, which may change while processes that hold it
    run."""
    return config.model_copy(update={name: Config.model_fields[name].default for name in ("replicas", "routers")})


class _Router:
    """A router process: OpenAI's API, its own view of the fleet, and its connections to the replicas."""

    def __init__(self, config: Config, handle: DeploymentHandle) -> None:
        if config.response_store_dir is None:
            config = config.model_copy(update={"response_store_dir": cache_folder() / "responses"})
        self._config = config
        folder = resolve(config.model, weights=False)  # a router needs the tokenizer and the sampling defaults
        self._service = open_service(
            config, folder, lambda fleet, replicas: ServePlacer(handle, fleet, replicas, config.replica_wait_s)
        )
        self._metrics = self._service.metrics
        listen(self._take)
        self._size = watch_size(handle, self._metrics.wanted.set)

    def _take(self, replicas: dict[str, dict[str, Any]]) -> None:
        """Takes over Serve's view of the running replicas: id to what each has published
        (`Replica.record_replica_metadata`)."""
        if replicas:
            self._service.context_length = min(replica["context_length"] for replica in replicas.values())
        self._metrics.attention.clear()
        self._metrics.attention.update({name: replica["attention"] for name, replica in replicas.items()})
        self._service.replicas.set_replicas({name: replica["address"] for name, replica in replicas.items()})


@serve.ingress()
class Router(_Router):
    """A router behind Serve's proxies."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service, self._config, answers_id=False)  # Serve's proxy adds it


class ListeningRouter(_Router):
    """A router that listens itself, on a port that it shares with the other routers of its machine."""

    async def __init__(self, config: Config, handle: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        super().__init__(config, handle)
        self._listener = Listener(create_app(self._service, self._config), config.host, config.port, DRAIN_S, config)
        await self._service.start()
        await self._listener.start()

    def check_health(self) -> None:
        """Raises RuntimeError once the HTTP server has ended."""
        if not self._listener.alive:
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Closes the router. Serve calls this when it removes the router, and waits for it."""
        await self._listener.close()
        await self._service.close()
