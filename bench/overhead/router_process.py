"""A router as a process of its own, in front of replicas at given addresses, without Ray.

    python -m bench.overhead.router_process FOLDER ADDRESS... [RECEIVER]   # prints its URL, runs on

With the URL of a receiver of traces, a second URL is printed, of the same router: there, every request is traced.

All of the router is real, its HTTP server too. Ray would only tell it the addresses.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from bench.secret import SECRET
from cluster.config import load
from cluster.in_process import OneReplicaPlacer
from cluster.service import open_models, open_service
from router.api import create_app
from router.http.listener import Listener
from router.metrics.metrics import Metrics

HOST = "127.0.0.1"


async def run(folder: Path, addresses: list[str]) -> None:
    """Serves the model in `folder`, whose replicas are at `addresses`, until it is cancelled."""
    receivers = [address for address in addresses if address.startswith("http")]
    addresses = [address for address in addresses if address not in receivers]
    config = load(overrides={"model": str(folder), "otlp_traces_endpoint": receivers[0] if receivers else None})
    (deployment,) = config.deployments
    metrics = Metrics()
    service = open_service(
        deployment,
        folder,
        metrics,
        lambda fleet, replicas: OneReplicaPlacer(fleet, replicas, config.replica_wait_s),
        SECRET,
    )
    models = open_models(config, {deployment.name: service}, metrics)
    service.replicas.set_replicas({f"r{number}": address for number, address in enumerate(addresses)})
    tracer, models.tracer = models.tracer, None
    apps = [create_app(models)]
    if tracer is not None:
        models.tracer = tracer
        apps.append(create_app(models))
    listeners = [Listener(app, HOST, 0, config) for app in apps]
    await models.start()
    for listener in listeners:
        await listener.start()
    while len(service.replicas.ready) < len(addresses):
        await service.replicas.changed()
    print(*("http://{}:{}".format(*listener.address) for listener in listeners), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(run(Path(sys.argv[1]), sys.argv[2:]))
