"""Throughput and CPU time of routers and proxies, the processes between a replica and its clients.

    shoal bench streams                  # 256 streams, about 10,000 tokens per second, one per chunk
    shoal bench streams --routers 4

No GPU is needed. A mock replica (`bench.replica.mock_replica`) schedules and sends tokens at the pace of Llama-3.1-8B
on an H200, and computes nothing. The workload `mini` runs on the engine without a server, then through each front:

listening  routers that listen themselves, as under `shoal serve`
proxied    routers behind Ray Serve's proxy, as on Kubernetes without HAProxy

Each front has a Ray cluster of its own. Figures:

vs_offline        tokens per second, divided by those without a server
cpu_us_per_token  microseconds of CPU that routers and proxies together use per token
"""

import contextlib
import logging
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import results
from bench.load.options import count, positive
from bench.replica import dummy_models, mock_replica, over_http, replica
from bench.replica.offline_workloads import JOBS, Job
from bench.replica.server_process import ServerFailed, end
from bench.results import Figure
from bench.secret import SECRET
from shoal.help import Parser

FRONTS = ("listening", "proxied")
MODEL = "tiny"
IN_FRONT = ("routers", "proxies")


class Announced:
    """Stand-in for `cluster.replica.Replica` that announces a replica which already runs."""

    def __init__(self, address: str, context_length: int) -> None:
        self._published = {"address": address, "context_length": context_length, "attention": ("none", "")}

    def record_replica_metadata(self) -> dict[str, Any]:
        return self._published


@contextlib.contextmanager
def silent_replica() -> Iterator[str]:
    """Runs the mock replica as a process and yields its address. Raises ServerFailed if it does not start."""
    child = subprocess.Popen([sys.executable, "-m", "bench.replica.mock_replica"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        if not address:
            raise ServerFailed("the silent replica did not start")
        yield address
    finally:
        end(child)


@contextlib.contextmanager
def front(kind: str, folder: Path, address: str, routers: int) -> Iterator[str]:
    """Starts Ray, with routers of this kind in front of the replica at `address`, and yields their URL. Ends Ray at the
    end."""
    from cluster import app, local  # Ray takes seconds to import
    from cluster.config import load
    from cluster.plane import cluster_secret

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"model": str(folder), "load_format": "dummy", "replicas": 1, "routers": routers, "port": port}
    config, _ = app.settle(load(overrides=settings), gpus=0)
    scratch = local.make_folder()
    try:
        local.start(config, scratch)
        cluster_secret(SECRET)
        _deploy(config, address, listening=kind == "listening")
        yield f"http://127.0.0.1:{port}"
    finally:
        local.end()


def _deploy(config: Any, address: str, listening: bool) -> None:
    import ray
    from ray import serve
    from ray.serve.config import ProxyLocation
    from ray.serve.schema import LoggingConfig

    from cluster import app

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    nodes = [ray.nodes()[0]["NodeManagerAddress"]] if listening else []
    serve.start(
        proxy_location=ProxyLocation.Disabled if listening else ProxyLocation.EveryNode,
        http_options={"host": config.host, "port": config.port},
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )
    replicas = serve.deployment(name="Replica", ray_actor_options={"num_cpus": 0}, request_router_config=app.PLACEMENT)(
        Announced
    ).bind(address, mock_replica.CONTEXT_LENGTH)
    serve.run(app.routers(config, [replicas], nodes), name=app.APP, route_prefix=None if listening else "/")


def offline(job: Job, rounds: int) -> float:
    """Output tokens per second of the mock engine without a server, the median of the rounds."""
    engine = mock_replica.engine()
    try:
        seconds = [replica.generate(engine, job).seconds for _ in range(rounds)]
    finally:
        engine.close()
    return sum(job[1]) / statistics.median(seconds)


def figures(prefix: str, offline_tok_s: float, measured: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """The figures of every front, named `PREFIX.FRONT.FIGURE`."""
    made = []
    for kind, found in measured.items():
        spent = over_http.cpu_us_per_token(found)
        in_front = sum(spent.get(role, 0.0) for role in IN_FRONT)
        made += [
            Figure(f"{prefix}.{kind}.vs_offline", found["output_tok_s"] / offline_tok_s, "ratio", True),
            Figure(f"{prefix}.{kind}.cpu_us_per_token", in_front, "us", False),
        ]
    return made


def parser() -> Parser:
    p = Parser("shoal bench streams", __doc__)
    p.add_argument("--routers", type=count, default=1, metavar="N", help="HTTP processes (default 1)")
    p.add_argument(
        "--scale", type=positive, default=1.0, help="fraction of the prompts; their lengths stay (default 1)"
    )
    p.add_argument("--rounds", type=count, default=2, help="counted rounds, after one that does not count (default 2)")
    p.add_argument("--front", choices=FRONTS, action="append", help="front to measure; may be repeated (default: all)")
    p.add_argument("--name", help="name of the result (default: cpu.streams, and the routers if several)")
    p.add_argument(
        "--out", type=Path, default=results.FOLDER, metavar="DIR", help="folder of the result (default: bench/results)"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a line per front, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    job = JOBS["mini"](args.scale)
    measured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        folder = dummy_models.write(MODEL, Path(scratch) / MODEL)
        offline_tok_s = offline(job, args.rounds)
        print(f"{'without a server':17s} {offline_tok_s:8.0f} tokens/s", flush=True)
        for kind in args.front or FRONTS:
            try:
                with silent_replica() as address, front(kind, folder, address, args.routers) as url:
                    measured[kind] = over_http.load(url, MODEL, job, 1, args.rounds)
            except ServerFailed as error:
                print(f"shoal bench streams: {kind}: {error}", file=sys.stderr)
                return 1
            print(f"{kind:17s} {over_http.line(measured[kind])}", flush=True)
    prefix = "cpu.streams" if args.routers == 1 else f"cpu.streams.routers{args.routers}"
    made = figures(prefix, offline_tok_s, measured)
    raw = {"routers": args.routers, "scale": args.scale, "offline_tok_s": offline_tok_s, "fronts": measured}
    path = results.write(args.name or prefix, made, raw, folder=args.out)
    for figure in made:
        print(f"{figure.name}: {figure.value:.3f}")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
