"""The lines of all machines' logs that are about a request."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster import joined, local

OF_SERVE = "serve/*.log"
OF_WORKERS = "worker-*.err"  # routers and replicas write to standard error
READ_S = 60.0


def find(text: str, address: str | None) -> list[str]:
    """The lines with `text` in them, oldest first, each with its machine and file before it. Raises NoCluster of
    `cluster.local`."""
    own = local.servers()
    if address is None and own:
        return _sorted(line for folder in own.values() for line in lines(text, local.logs(folder)))
    local.join_or_tell(address)
    try:
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        return _sorted(_of_cluster(text))
    finally:
        ray.shutdown()


def _of_cluster(text: str) -> Iterable[str]:
    # Ray uses its processes again: those of other code would run that.
    environment = {"env_vars": {"SHOAL_BUILD": joined.build()}}
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(_of_machine).options(num_cpus=0, scheduling_strategy=place, runtime_env=environment)
            asked[node["NodeManagerAddress"]] = task.remote(text)
    for address, found in asked.items():
        try:
            yield from (f"{address} {line}" for line in ray.get(found, timeout=READ_S))
        except RayError as error:
            yield f"{address} cannot be read: {type(error).__name__}"


def _of_machine(text: str) -> list[str]:
    own = Path(os.readlink("/proc/self/fd/2"))  # where Ray has this process write: its folder of logs
    return list(lines(text, own.parent))


def lines(text: str, folder: Path) -> Iterable[str]:
    """The lines of a folder of logs that have `text` in them, each with its file before it."""
    for file in [*folder.glob(OF_WORKERS), *folder.glob(OF_SERVE)]:
        with file.open(errors="replace") as opened:
            yield from (f"{file.relative_to(folder)}: {line.rstrip()}" for line in opened if text in line)


def _sorted(found: Iterable[str]) -> list[str]:
    """By the time with which lines begin."""
    return sorted(found, key=lambda line: line.partition(": ")[2])
