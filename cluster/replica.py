"""One replica in Ray: a light control actor, which Serve watches, and the rank processes, which it watches.

The ranks are the control actor's children: when it ends, however it ends, Ray ends them. When one of them ends, the
health check fails and Serve puts a new replica, with new processes, in this one's place. One that hangs has ended too.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import Config
from cluster.rank import Rank

CONTROL_CPUS = 0.01  # the control actor sleeps nearly always, but a bundle must hold something
ASK_S = 2.0  # between questions to a rank, whether it is alive
# A rank that answers none for so long hangs. One that is well may be starved of its CPU, or in a device's library that
# keeps the interpreter to itself for many seconds.
HANG_S = 60.0

log = logging.getLogger("ray.serve")


class ReplicaError(RuntimeError):
    """A rank did not start, ended, or hangs. One line, for people."""


def bundles(config: Config) -> list[dict[str, float]]:
    """The resources of one replica's placement group: the control actor's, then one bundle a stage, whose ranks talk so
    much that they must share a node."""
    stage = {name: config.tp * amount for name, amount in rank_resources(config).items()}
    return [{"CPU": CONTROL_CPUS}] + [stage] * config.pp


def rank_resources(config: Config) -> dict[str, float]:
    cpus = config.cpus_per_rank or 1.0
    return {"CPU": cpus, "GPU": config.gpus_per_rank} if config.device == "cuda" else {"CPU": cpus}


class Replica:
    """The Serve deployment. Runs no model and carries no tokens; must stay free of torch, to start at once."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        self._ended: str | None = None
        group = ray.util.get_current_placement_group()
        assert group is not None, "the deployment has placement_group_bundles"
        self._ranks = start_ranks(config, group)
        # The scheduler is on the leading rank; the others meet it where it says.
        leading, within_s = config.leading_rank, config.start_timeout_s
        meeting = (await _gather({leading: self._ranks[leading].open.remote(config)}, within_s))[leading]
        loads = {index: rank.load.remote(config, index, meeting) for index, rank in enumerate(self._ranks)}
        self._published: dict[str, Any] = (await _gather(loads, within_s))[leading]
        self._runs: list[ObjectRef] = [rank.run.remote() for rank in self._ranks]
        self._watcher = asyncio.create_task(self._watch())

    def record_replica_metadata(self) -> dict[str, Any]:
        """What Serve tells every router about this replica, once, before it sends requests here."""
        return self._published

    def check_health(self) -> None:
        """Raises ReplicaError once a rank has ended, or hangs."""
        if self._ended is not None:
            raise ReplicaError(self._ended)

    async def _watch(self) -> None:
        """The first rank that ends or hangs is the end of the replica."""
        ends = [asyncio.ensure_future(_end(*rank)) for rank in zip(self._ranks, self._runs, strict=True)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self._ended = next(f"rank {rank}: {end.result()}" for rank, end in enumerate(ends) if end.done())
        for end in ends:
            end.cancel()
        log.error("replica at %s: %s", self._published["address"], self._ended)
        # Routers see the leading one go, and resume its streams, without waiting for Serve.
        for left in self._ranks:
            ray.kill(left)


async def _gather(refs: Mapping[int, ObjectRef], within_s: float) -> dict[int, Any]:
    """The ranks' answers, by rank. Raises ReplicaError as soon as one fails, for the others may wait for it for ever,
    and when one has not answered in time; the reason is in the log too."""
    futures = {rank: asyncio.ensure_future(ref) for rank, ref in refs.items()}
    _, late = await asyncio.wait(futures.values(), timeout=within_s, return_when=asyncio.FIRST_EXCEPTION)
    failed = [
        f"rank {rank}: {_reason(error)}"
        for rank, future in futures.items()
        if future.done() and (error := future.exception()) is not None
    ]
    if late and not failed:
        ranks = ", ".join(str(rank) for rank, future in futures.items() if future in late)
        failed = [f"rank {ranks}: not loaded within start_timeout_s={within_s:g}; raise it if nothing hangs there"]
    if failed:
        log.error("replica does not start: %s", failed[0])
        raise ReplicaError(failed[0])
    return {rank: future.result() for rank, future in futures.items()}


async def _end(rank: ActorHandle, run: ObjectRef) -> str:
    """Returns when the rank's loop or process has ended, or it hangs: how. No `run` returns while all is well."""
    loop = asyncio.ensure_future(run)
    answer: asyncio.Future[str] | None = None
    who, missed = "it never answered", 0
    # Periods are counted, not seconds: where everything stood still, this actor too, no rank has missed more than one.
    while missed * ASK_S < HANG_S:
        if answer is None:
            answer = asyncio.ensure_future(rank.alive.remote())
        await asyncio.wait((loop,), timeout=ASK_S)
        if loop.done():
            error = loop.exception()
            return _reason(error) if error else "its loop ended"
        missed += 1
        if answer.done():
            if answer.exception() is None:  # else it could not be reached: if it has ended, `run` says so
                who, missed = answer.result(), 0
            answer = None
    return f"its process hangs ({who}): no answer for {HANG_S:g} s"


def start_ranks(config: Config, group: PlacementGroup) -> list[ActorHandle]:
    """The actors of all ranks, in their order. Stages that share a node are neighbours."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    stages = sorted(range(1, len(nodes)), key=lambda bundle: (nodes[bundle], bundle))
    return [_start(config, group, bundle) for bundle in stages for _ in range(config.tp)]


def _start(config: Config, group: PlacementGroup, bundle: int) -> ActorHandle:
    resources = rank_resources(config)
    actor: Any = ray.remote(Rank).options(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        max_concurrency=2,  # `run` keeps one thread
        max_restarts=0,  # a rank alone is of no use: the replica is replaced as a whole
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    )
    handle: ActorHandle = actor.remote()
    return handle


def _reason(error: BaseException) -> str:
    """One line: the rank's own exception, or how its process ended."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        return _end_of_process(" ".join(str(error).split()))
    return f"{type(error).__name__}: {error}"


def _end_of_process(said: str) -> str:
    """What Ray says of a process that has gone, without its page of advice."""
    where = [found[0] for name in ("pid", "ip") if (found := re.search(rf"\b{name}: [\w.:]+", said))]
    detail = re.search(r"Worker exit detail: (.+?)(?= Some common causes|$)", said)
    return (
        f"its process died ({', '.join(where)}): {detail[1] if detail else said[:300]} "
        "If nobody ended it, dmesg may say that the kernel did, for want of memory."
    )
