"""The Serve application: routers in front, the replicas of each model behind, one deployment for each model.

The same for every way to start it, except for who listens.

- `build` is for `serve run cluster.app:build` and for a RayService's `import_path`; its arguments are the keys of the
  configuration. Serve's proxies listen, on every node that takes part, and pass requests on to the routers. A
  RayService sets the numbers of replicas and routers in its `deployments`, because Serve restarts all of them when an
  argument changes.
- `application` is for `shoal serve`, with routers that listen on its own machine: a token that passes Serve's Python
  proxy costs more there than in the router.
"""

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import ray
from fastapi import FastAPI
from pydantic import SecretStr
from ray import serve
from ray.serve import Application
from ray.serve.config import ProxyLocation, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from cluster import log_lines
from cluster.autoscaler import Autoscaler, Teller
from cluster.config import Config, DeploymentConfig, check_behind_proxies, load, upstream_keys
from cluster.deployed import APP, ROUTER, STREAMS_S, watch
from cluster.followed_config import unscaled, unscaled_deployment
from cluster.hang import end_if_stuck
from cluster.joined import NODE_SHARE
from cluster.listening import keep_serve_here
from cluster.models import resolve
from cluster.plane import cluster_secret
from cluster.replica import CONTROL_CPUS, STOP_S, Replica, bundles
from cluster.request_router import ServePlacer, listen
from cluster.scaling import Scaling
from cluster.service import open_models, open_service
from router.api import create_app, create_metrics_app
from router.http.listener import Listener
from router.http.own_port import OwnPort
from router.metrics.metrics import Metrics
from router.service import Service
from worker.folders import cache_folder

UNLIMITED_REQUESTS = 1 << 20  # requests that Serve lets through at once: the scheduler does admission, in tokens
PLACEMENT = RequestRouterConfig(
    request_router_class="cluster.request_router:PlacementRouter"  # type: ignore[arg-type]  # Ray's annotation is wrong
)
# How long a control actor or a router may take to answer a health check; after three late answers it is replaced. Both
# wait for other processes most of the time, so a starved machine is the most that could delay them. Serve's own 30 s
# would leave what hangs in place for a minute and a half.
HEALTH_ANSWER_S = 10.0
# What a router behind Serve's proxies asks Ray for, the least that Ray counts: it keeps routers off machines that have
# no CPUs to give. Kubernetes' head is one, whose memory is not made for them, and whose proxy says 503 where there is
# no worker.
ROUTER_CPUS = 0.0001
LOOPBACK = "127.0.0.1"  # `replica_host` of a server on one machine


def build(args: dict[str, Any]) -> Application:
    """The application for a configuration's keys. Raises ConfigError. Ray must be running: its GPUs decide the
    device."""
    config, _ = settle(load(overrides=args), gpus=ray.cluster_resources().get("GPU", 0))
    return application(config)


def settle(config: Config, gpus: float) -> tuple[Config, str | None]:
    """The configuration with everything filled in that depends on the cluster, so that all processes agree; and a note
    about it for the user, or None."""
    auto: Literal["cpu", "cuda"] = "cuda" if gpus > 0 else "cpu"
    choices = [deployment for deployment in config.deployments if deployment.device == "auto"]
    note = None
    if choices and auto == "cpu":
        note = f"no GPU here: the {'model runs' if len(choices) == 1 else 'models run'} on CPUs"

    def settled(deployment: DeploymentConfig) -> DeploymentConfig:
        return deployment.model_copy(update={"device": auto}) if deployment in choices else deployment

    return config.changed(settled), note


def application(
    config: Config,
    nodes: Sequence[str] = (),
    replica_type: type[Replica] = Replica,
    spare: Collection[str] = (),
) -> Application:
    """The application. With `nodes` (their addresses in Ray) the routers run on each of these machines and listen on
    `host` and `port` themselves; their CPUs are reserved already (`cluster.joined.reserve`). Without, they run
    anywhere, behind Serve's proxies. `spare`: models of which the cluster has room for one more replica. `config` must
    be settled. Raises ConfigError for a key of another endpoint that this process's environment does not have."""
    replicas = [
        _replicas(config, deployment, replica_type, deployment.name in spare) for deployment in config.deployments
    ]
    return routers(config, replicas, nodes)


def _replicas(
    config: Config, deployment: DeploymentConfig, replica_type: type[Replica], has_spare: bool
) -> Application:
    """The deployment of one model's replicas. Each replica has a placement group of its own."""
    return serve.deployment(
        name=config.deployment_name(deployment),
        num_replicas=deployment.replicas,
        ray_actor_options={"num_cpus": CONTROL_CPUS},
        placement_group_bundles=bundles(deployment),
        placement_group_strategy="PACK",
        # A new version of a replica starts before one of the old version ends, where there is room for it.
        max_surge_percent=1 if has_spare else 0,
        request_router_config=PLACEMENT,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=HEALTH_ANSWER_S,
        graceful_shutdown_wait_loop_s=0.1,  # Serve itself has sent the control actor nothing
        graceful_shutdown_timeout_s=config.drain_s + STOP_S,
    )(replica_type).bind(unscaled_deployment(deployment), config.drain_s, config.log_format)


def routers(config: Config, replicas: Sequence[Application], nodes: Sequence[str] = ()) -> Application:
    """The routers of `application`, in front of deployments that publish the same metadata as `Replica`, one for each
    of `config.deployments`. Raises ConfigError."""
    autoscaler = _autoscaler(config)
    if not nodes:
        check_behind_proxies(config)
        return _routers(config, replicas, autoscaler, None)
    first, *others = nodes
    return _routers(config, replicas, autoscaler, first, [_routers(config, replicas, autoscaler, it) for it in others])


def _routers(
    config: Config,
    replicas: Sequence[Application],
    autoscaler: Application | None,
    node: str | None,
    others: Sequence[Application] = (),
) -> Application:
    """The deployment of the routers of one machine, or of those behind Serve's proxies. `others`: of other machines;
    an application of Serve is one deployment with all that it is given."""
    # They do not ask Ray for the CPUs that they need: one that ends with its last stream would keep them, and its
    # successor would wait. Room for them is reserved (`cluster.joined`), or in the pods (helm/shoal).
    actor: dict[str, Any] = {"num_cpus": ROUTER_CPUS}
    if node is not None:
        actor = {"num_cpus": 0, "resources": {f"node:{node}": NODE_SHARE}}
    return serve.deployment(
        name=router_deployment(config, node),
        num_replicas=config.num_routers,
        ray_actor_options=actor,
        max_ongoing_requests=UNLIMITED_REQUESTS,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=HEALTH_ANSWER_S,
        max_surge_percent=1,  # one at a time, before one of another version goes
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=STREAMS_S,
    )(Router if node is None else ListeningRouter).bind(
        unscaled(config), upstream_keys(config), *replicas, autoscaler=autoscaler, others=list(others)
    )


def router_deployment(config: Config, node: str | None) -> str:
    """The name of the deployment of a machine's routers: ROUTER, or ROUTER-ADDRESS where several machines have some."""
    return f"{ROUTER}-{node}" if len(config.router_hosts) > 1 else ROUTER


def _autoscaler(config: Config) -> Application | None:
    """The deployment of the autoscaler, if a model's number of replicas is its to choose."""
    scaled = {config.deployment_name(each): Scaling.of(each) for each in config.deployments if each.max_replicas}
    if not scaled:
        return None
    return serve.deployment(
        name=Autoscaler.__name__,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=HEALTH_ANSWER_S,
    )(Autoscaler).bind(scaled, config.log_format)


def deploy(app: Application) -> None:
    """Gives an application whose routers listen themselves to Serve, which must not run yet or runs this application
    already: it then replaces all of its processes, a few at a time. Returns at once."""
    serve.start(
        proxy_location=ProxyLocation.Disabled,
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )
    # The "external scaler" is `cluster.deployed.scale`.
    targets = [serve.RunTarget(app, name=APP, route_prefix=None, external_scaler_enabled=True)]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def numbers(config: Config) -> dict[str, int]:
    """How many replicas each deployment in Serve should have; routers are replicas of theirs."""
    found = {config.deployment_name(deployment): deployment.replicas for deployment in config.deployments}
    return {**found, **{router_deployment(config, node): config.num_routers for node in config.router_hosts or (None,)}}


class _Router:
    """A router process: OpenAI's API, and for each model its own view of the fleet, and its connections to the
    replicas."""

    _is_proxied = True

    def __init__(
        self,
        config: Config,
        keys: Mapping[str, SecretStr],
        *handles: DeploymentHandle,
        autoscaler: DeploymentHandle | None = None,
        others: Sequence[DeploymentHandle] = (),
    ) -> None:
        """`handles`: of the deployments of `config.deployments`. `keys`: of `upstream_keys`. `autoscaler`: of its
        deployment, if there is one. `others`: of the routers of other machines, which nothing asks."""
        if config.response_store_dir is None:
            config = config.model_copy(update={"response_store_dir": cache_folder() / "responses"})
        self._config = config
        metrics = Metrics(router=uuid.uuid4().hex[:8])
        keep_serve_here()
        log_lines.set_up(config.log_format, router=metrics.router)
        services = {}
        sizes: dict[str, Callable[[int], None]] = {}
        for deployment, handle in zip(config.deployments, handles, strict=True):
            service = services[deployment.name] = _open(deployment, handle, metrics, config.drain_s)
            name = config.deployment_name(deployment)
            listen(name, partial(_take, service, deployment.model))
            if not deployment.max_replicas:
                sizes[name] = service.metrics.wanted.set
        self._models = open_models(config, services, metrics, keys)
        self._watching = watch(sizes, config.drain_s, self._models.shutdown.come)
        self._living = end_if_stuck()
        if config.metrics_port is not None:
            # Behind Serve's proxies, `host` is not where routers listen.
            own = ray.util.get_node_ip_address() if self._is_proxied else config.host
            port = OwnPort(create_metrics_app(self._models), own, config.metrics_port, config)
            self._models.alongside(port.start, port.close)
        self._teller: Teller | None = None
        if autoscaler is not None:
            demands = {config.deployment_name(each): services[each.name].demand for each in config.deployments}
            told = {config.deployment_name(each): services[each.name].told_wanted for each in config.deployments}
            self._teller = Teller(metrics.router, autoscaler, demands, lambda name, wanted: told[name](*wanted))


def _open(config: DeploymentConfig, handle: DeploymentHandle, metrics: Metrics, drain_s: float) -> Service:
    folder = resolve(config.model, weights=False)  # a router needs the tokenizer and the sampling defaults
    wait_s = max(config.replica_wait_s, config.start_timeout_s) if config.may_sleep else config.replica_wait_s
    return open_service(
        config,
        folder,
        metrics,
        lambda fleet, replicas: ServePlacer(handle, fleet, replicas, wait_s),
        cluster_secret(),
        # Replicas may have an address that is not this machine's.
        peer_host=LOOPBACK if config.replica_host == LOOPBACK else ray.util.get_node_ip_address(),
        drain_s=drain_s,
    )


def _take(service: Service, model: str, replicas: dict[str, dict[str, Any]]) -> None:
    """Takes over Serve's view of a model's running replicas: id to what each has published
    (`Replica.record_replica_metadata`). Those of another version that have another model are none: the streams of this
    one cannot go on there."""
    replicas = {name: replica for name, replica in replicas.items() if replica.get("model", model) == model}
    if replicas:
        service.context_length = min(replica["context_length"] for replica in replicas.values())
    attention = service.metrics.attention
    attention.clear()
    attention.update({name: replica["attention"] for name, replica in replicas.items()})
    service.replicas.set_replicas({name: replica["address"] for name, replica in replicas.items()})


@serve.ingress()
class Router(_Router):
    """A router behind Serve's proxies."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._models, answers_id=False)  # Serve's proxy adds it


class ListeningRouter(_Router):
    """A router that listens itself, on a port that it shares with the other routers of its machine."""

    _is_proxied = False

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Config,
        keys: Mapping[str, SecretStr],
        *handles: DeploymentHandle,
        autoscaler: DeploymentHandle | None = None,
        others: Sequence[DeploymentHandle] = (),
    ) -> None:
        super().__init__(config, keys, *handles, autoscaler=autoscaler)
        self._listener = Listener(create_app(self._models), config.host, config.port, config)
        await self._models.start()
        await self._listener.start()

    def check_health(self) -> None:
        """Raises RuntimeError once the HTTP server has ended."""
        if not self._listener.alive:
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Closes the router, once its streams have ended. Serve calls this when it removes the router, and waits for
        it."""
        self._models.leaving = True
        await self._listener.close()
        if self._teller is not None:
            await self._teller.close()
        self._watching.cancel()
        self._living.cancel()
        await self._models.close()
