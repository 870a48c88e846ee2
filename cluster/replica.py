"""A replica in Ray: a light control actor, which Serve watches, and the rank processes, which the control actor
watches.

The ranks are children of the control actor: when it ends, for whatever reason, Ray ends them. When a rank ends or
hangs, the health check fails, and Serve starts a new replica with new processes in place of this one.
"""

import asyncio
import logging
import re
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple

import ray
from ray import ObjectRef, serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster import log_lines
from cluster.config import ReplicaConfig
from cluster.hang import Stalled, suspects
from cluster.listening import keep_serve_here
from cluster.log_lines import LogFormat
from cluster.rank import Pulse, Rank
from worker.progress import NewestSteps

STOP_S = 10.0  # how long the processes of a replica may take to end, besides its streams
CONTROL_CPUS = 0.01  # the control actor sleeps nearly always, but a bundle must hold something
ASK_S = 2.0  # interval between liveness checks of a rank
# A rank that answers no check for this long hangs. A healthy rank may answer late: when it is starved of CPU, or inside
# a device library that holds the GIL for many seconds.
HANG_S = 60.0

LOOP_ENDED = "its loop ended"

log = logging.getLogger("ray.serve")


class NoProgress(NamedTuple):
    """The replica had work, and no step has ended for `limit_s` seconds."""

    limit_s: float


class Silent(NamedTuple):
    """The leading rank does not hear these ranks any more, whose processes have not ended."""

    ranks: tuple[int, ...]


class ReplicaError(RuntimeError):
    """A rank did not start, ended, or hangs. The message is one line, for people."""


def bundles(config: ReplicaConfig) -> list[dict[str, float]]:
    """The resources of one replica's placement group: a bundle for the control actor, then one for each stage. The
    ranks of a stage communicate so much that they must share a node."""
    stage = {name: config.tp * amount for name, amount in rank_resources(config).items()}
    return [{"CPU": CONTROL_CPUS}] + [stage] * config.pp


def rank_resources(config: ReplicaConfig) -> dict[str, float]:
    cpus = config.cpus_per_rank or 1.0
    return {"CPU": cpus, "GPU": config.gpus_per_rank} if config.device == "cuda" else {"CPU": cpus}


class Replica:
    """The Serve deployment of a replica. Runs no model and carries no tokens. Must not import torch, to start at
    once."""

    rank_type: type[Rank] = Rank  # the actors' class; benchmarks extend it
    _watcher: asyncio.Task[None] | None = None  # once the ranks run
    _is_leaving = False

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ReplicaConfig, drain_s: float, log_format: LogFormat
    ) -> None:
        """`drain_s`: how long, in seconds, the replica may keep its streams once it is taken away. `log_format`: of the
        lines that its processes write."""
        name = serve.get_replica_context().replica_id.unique_id
        keep_serve_here()
        log_lines.set_up(log_format, replica=name)
        self._ended: str | None = None
        self._drain_s = drain_s
        self._tp, self._leading = config.tp, config.leading_rank
        group = ray.util.get_current_placement_group()
        assert group is not None, "the deployment has placement_group_bundles"
        self._ranks = start_ranks(config, group, self.rank_type)
        for index, rank in enumerate(self._ranks):
            rank.write_logs.remote(log_format, name, index)
        # The scheduler is on the leading rank; the other ranks connect to the address that it opens.
        leading, within_s = config.leading_rank, config.start_timeout_s
        meeting = (await _gather({leading: self._ranks[leading].open.remote(config)}, within_s))[leading]
        loads = {index: rank.load.remote(config, index, meeting) for index, rank in enumerate(self._ranks)}
        self._published: dict[str, Any] = {"model": config.model} | (await _gather(loads, within_s))[leading]
        self._runs: list[ObjectRef] = [rank.run.remote() for rank in self._ranks]
        self._watcher = asyncio.create_task(self._watch())

    def record_replica_metadata(self) -> dict[str, Any]:
        """The replica's metadata. Serve passes it to every router, once, before it sends requests here."""
        return self._published

    def check_health(self) -> None:
        """Raises ReplicaError once a rank has ended, or hangs."""
        if self._ended is not None:
            raise ReplicaError(self._ended)

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Serve calls this when it takes the replica away, and awaits what it returns."""
        return None if self._watcher is None or self._watcher.done() else self._leave(self._watcher)

    async def _leave(self, watcher: asyncio.Task[None]) -> None:
        """Lets the streams end, or hands them over to other replicas, within `drain_s`."""
        self._is_leaving = True
        self._ranks[self._leading].drain.remote(self._drain_s)
        await asyncio.wait((watcher,), timeout=self._drain_s + STOP_S / 2)

    async def _watch(self) -> None:
        """Waits for the first rank that ends or hangs, and then ends the whole replica."""
        ranks = zip(self._ranks, self._runs, strict=True)
        ends = [asyncio.ensure_future(_end(rank, run)) for rank, run in ranks]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        rank, end = next((rank, end.result()) for rank, end in enumerate(ends) if end.done())
        for other in ends:
            other.cancel()
        if not isinstance(end, str):
            self._ended = await self._blame(end) if isinstance(end, NoProgress) else _named(end)
            # Only a goodbye: routers notice the end without it, and may not hear it.
            await _answer(self._ranks[self._leading].farewell.remote(self._ended))
        else:
            self._ended = f"rank {rank}: {end}"
        if self._is_leaving and rank == self._leading and end == LOOP_ENDED:
            log.info("replica at %s was taken away", self._published["address"])
        else:
            log.error("replica at %s: %s", self._published["address"], self._ended)
        # Routers see the leading rank go, and resume its streams, without waiting for Serve.
        for left in self._ranks:
            ray.kill(left)

    async def _blame(self, end: NoProgress) -> str:
        """Says which rank hangs, after the replica has made no progress for too long."""
        pulses = await asyncio.gather(*(_answer(rank.alive.remote()) for rank in self._ranks))
        late = suspects([pulse and pulse.steps for pulse in pulses], self._tp, self._leading)
        named = []
        for rank in late:
            pulse = pulses[rank]
            where = "it does not answer" if pulse is None else f"{pulse.who}{_at(pulse.steps)}"
            named.append(f"rank {rank} hangs ({where})")
        return f"{', '.join(named)}: no step has ended for {end.limit_s:g} s"


def _named(end: Silent) -> str:
    ranks = ", ".join(f"rank {rank}" for rank in end.ranks)
    return f"{ranks} hangs (its process stands still, or its host is gone): the leading rank does not hear it"


async def _answer(asked: ObjectRef) -> Any:
    """A rank's answer; None if there is none within `ASK_S`."""
    future = asyncio.ensure_future(asked)
    await asyncio.wait((future,), timeout=ASK_S)
    return future.result() if future.done() and future.exception() is None else None


def _at(steps: NewestSteps | None) -> str:
    if steps is None or steps.ended >= steps.begun:
        return ", between two steps"
    return f", in step {steps.ended + 1}"


async def _gather(refs: Mapping[int, ObjectRef], within_s: float) -> dict[int, Any]:
    """The ranks' answers, by rank. Raises ReplicaError, and logs the reason, as soon as a rank fails (the others may
    wait for it for ever) or when a rank has not answered within `within_s` seconds."""
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


async def _end(rank: ActorHandle, run: ObjectRef) -> str | NoProgress | Silent:
    """Waits until the rank's loop or process has ended, or hangs. Returns how. `run` never returns while all is
    well."""
    loop = asyncio.ensure_future(run)
    answer: asyncio.Future[Pulse] | None = None
    who, stalled = "it never answered", Stalled(ASK_S)
    # Checks are counted, not seconds. If the whole machine stood still, this actor too, then each rank has missed one
    # check at most.
    missed, heard_silent = 0, False
    while missed * ASK_S < HANG_S:
        if answer is None:
            answer = asyncio.ensure_future(rank.alive.remote())
        await asyncio.wait((loop,), timeout=ASK_S)
        if loop.done():
            error = loop.exception()
            return _reason(error) if error else LOOP_ENDED
        missed += 1
        if answer.done():
            if answer.exception() is None:  # otherwise it was out of reach: if it has ended, `run` says so
                pulse, missed = answer.result(), 0
                who = pulse.who
                # A process that has ended is silent too: its own `run` says so first, and better.
                if heard_silent and pulse.silent:
                    return Silent(pulse.silent)
                heard_silent = bool(pulse.silent)
                if (limit_s := stalled.look(pulse.progress)) is not None:
                    return NoProgress(limit_s)
            answer = None
    return f"its process hangs ({who}): no answer for {HANG_S:g} s"


def start_ranks(config: ReplicaConfig, group: PlacementGroup, rank_type: type[Rank] = Rank) -> list[ActorHandle]:
    """Starts the actors of all ranks; returns them in order of rank. Stages that share a node are neighbours."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    stages = sorted(range(1, len(nodes)), key=lambda bundle: (nodes[bundle], bundle))
    return [_start(config, group, bundle, rank_type) for bundle in stages for _ in range(config.tp)]


def _start(config: ReplicaConfig, group: PlacementGroup, bundle: int, rank_type: type[Rank]) -> ActorHandle:
    resources = rank_resources(config)
    actor: Any = ray.remote(rank_type).options(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        max_concurrency=2,  # `run` keeps one thread
        max_restarts=0,  # a rank alone is of no use: the replica is replaced as a whole
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    )
    handle: ActorHandle = actor.remote()
    return handle


def _reason(error: BaseException) -> str:
    """The reason in one line: the rank's own exception, or how its process ended."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        return _end_of_process(" ".join(str(error).split()))
    return f"{type(error).__name__}: {error}"


def _end_of_process(said: str) -> str:
    """Ray's report on a process that has died, without its page of advice."""
    where = [found[0] for name in ("pid", "ip") if (found := re.search(rf"\b{name}: [\w.:]+", said))]
    detail = re.search(r"Worker exit detail: (.+?)(?= Some common causes|$)", said)
    return (
        f"its process died ({', '.join(where)}): {detail[1] if detail else said[:300]} "
        "If it was not killed on purpose, look into dmesg: the kernel may have killed it for lack of memory."
    )
