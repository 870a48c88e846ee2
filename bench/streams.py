"""What stands between a replica and its clients, at the pace of a GPU and without one.

    python -m bench.streams                  # 256 streams, about 10,000 tokens a second, a chunk for each
    python -m bench.streams --routers 4

The replica is silent (`bench.silent`): it schedules and sends as one of Llama-3.1-8B on an H200 would, and computes
nothing. `mini` is put through it without a server, then through routers that listen themselves, as under `shoal serve`,
then through routers behind Ray Serve's proxy, as on Kubernetes without HAProxy. Every front has a Ray of its own.

vs_offline         tokens a second over those without a server
cpu_us_per_token   microseconds of CPU that routers and proxies together take for a token
"""

import argparse
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

from bench import over_http, replica, results, shapes, silent
from bench.child import ServerFailed, end
from bench.jobs import JOBS, Job
from bench.results import Figure

FRONTS = ("listening", "proxied")
MODEL = "tiny"
IN_FRONT = ("routers", "proxies")


class Announced:
    """In place of `cluster.replica.Replica`, for a replica that runs already."""

    def __init__(self, address: str, context_length: int) -> None:
        self._published = {"address": address, "context_length": context_length}

    def record_replica_metadata(self) -> dict[str, Any]:
        return self._published


@contextlib.contextmanager
def silent_replica() -> Iterator[str]:
    """A process that is one; its address."""
    child = subprocess.Popen([sys.executable, "-m", "bench.silent"], stdout=subprocess.PIPE, text=True)
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
    """Ray, with routers of this kind in front of the replica at `address`; their URL. All ends with it."""
    from cluster import app, local  # Ray takes seconds to import
    from cluster.config import load

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"model": str(folder), "load_format": "dummy", "replicas": 1, "routers": routers, "port": port}
    config, _ = app.settle(load(overrides=settings), gpus=0)
    scratch = local.make_folder()
    try:
        local.start(config, scratch)
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
    node = ray.nodes()[0]["NodeManagerAddress"] if listening else None
    serve.start(
        proxy_location=ProxyLocation.Disabled if listening else ProxyLocation.EveryNode,
        http_options={"host": config.host, "port": config.port},
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )
    replicas = serve.deployment(name="Replica", ray_actor_options={"num_cpus": 0}, request_router_config=app.PLACEMENT)(
        Announced
    ).bind(address, silent.CONTEXT_LENGTH)
    serve.run(app.routers(config, replicas, node), name=app.APP, route_prefix=None if listening else "/")


def offline(job: Job, rounds: int) -> float:
    """Tokens a second of the silent engine itself: the median."""
    engine = silent.engine()
    try:
        seconds = [replica.generate(engine, job).seconds for _ in range(rounds)]
    finally:
        engine.close()
    return sum(job[1]) / statistics.median(seconds)


def figures(prefix: str, offline_tok_s: float, measured: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Of every front, by its name. Theirs begin with `prefix`."""
    made = []
    for kind, found in measured.items():
        spent = over_http.cpu_us_per_token(found)
        in_front = sum(spent.get(role, 0.0) for role in IN_FRONT)
        made += [
            Figure(f"{prefix}.{kind}.vs_offline", found["output_tok_s"] / offline_tok_s, "ratio", True),
            Figure(f"{prefix}.{kind}.cpu_us_per_token", in_front, "us", False),
        ]
    return made


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="shoal bench streams", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--routers", type=int, default=1, metavar="N", help="HTTP processes (default 1)")
    p.add_argument("--scale", type=float, default=1.0, help="part of the prompts, all at their full length (default 1)")
    p.add_argument("--rounds", type=int, default=2, help="that count, after one that does not (default 2)")
    p.add_argument("--front", choices=FRONTS, action="append", help="only this one; may be given again (default: all)")
    p.add_argument("--name", help="of the result (default: cpu.streams, with the number of routers)")
    p.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="default: bench/results")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a line a front, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    job = JOBS["mini"](args.scale)
    measured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        folder = shapes.write(MODEL, Path(scratch) / MODEL)
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
