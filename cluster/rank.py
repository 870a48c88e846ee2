"""A rank process of a replica: the GPU, or the share of the CPU, that one rank of one stage computes on."""

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from cluster import log_lines
from cluster.config import ReplicaConfig
from cluster.log_lines import LogFormat
from cluster.models import resolve, with_draft_folder
from cluster.plane import cluster_secret
from worker.folders import cache_folder
from worker.niceness import run_steps
from worker.progress import NewestSteps, WorkProgress
from worker.spinning import limit_spinning

if TYPE_CHECKING:
    from worker.engine.engine import Engine
    from worker.engine.server import Server
    from worker.executor.multi_rank import Follower
    from worker.parallel.meeting import Meeting
    from worker.parallel.rank_store import RankStore


class Pulse(NamedTuple):
    """A rank's answer to a liveness check.

    | field | meaning |
    | --- | --- |
    | `who` | its process and node, for people |
    | `progress` | how far the replica's work is; None while there is none, and for ranks other than the leading one |
    | `steps` | how far this rank has come |
    | `silent` | of the leading rank: the other ranks that it does not hear any more |
    """

    who: str
    progress: WorkProgress | None = None
    steps: NewestSteps | None = None
    silent: tuple[int, ...] = ()


class Rank:
    """The Ray actor around a rank's loop: `worker.engine.server.Server` on the leading rank,
    `worker.executor.multi_rank.Follower` on the others. `run` holds one of the actor's threads until the loop ends."""

    def __init__(self) -> None:
        limit_spinning(os.environ)
        self._loop: Server | Follower | None = None
        self._server: Server | None = None  # the same object, on the leading rank
        self._follower: Follower | None = None  # on the others
        self._store: RankStore | None = None

    def write_logs(self, log_format: LogFormat, replica: str, rank: int) -> None:
        """Lets this process write its log in this form, with the replica's id and the rank in every line."""
        log_lines.set_up(log_format, replica=replica, rank=rank)

    def open(self, config: ReplicaConfig) -> "Meeting | None":
        """Returns where all ranks will meet; None for a replica of one rank. Called on the leading rank,
        before any rank loads."""
        if config.num_ranks == 1:
            return None
        from worker.parallel.rank_store import open_store  # imports torch, which the control actor must not

        self._store, meeting = open_store(_host(config))
        return meeting

    def load(self, config: ReplicaConfig, rank: int = 0, meeting: "Meeting | None" = None) -> dict[str, Any]:
        """Gets the model onto this node if it is missing, loads this rank's part together with the other ranks, and
        binds. `meeting` is what `open` returned on the leading rank. Raises the errors of the model's folder, the
        weights or the device.

        The leading rank returns what routers must know (`cluster.replica_server.published`), other ranks an empty dict.
        """
        from cluster.replica_server import open_server, published
        from worker.executor.multi_rank import Follower
        from worker.parallel.rank_store import find_store

        folder: Path = resolve(config.model, weights=config.load_format != "dummy", dequantize=config.dequantize)
        config = with_draft_folder(config)
        if rank != config.leading_rank:
            assert meeting is not None
            self._loop = self._follower = Follower(
                folder, config, rank, find_store(meeting), gemm_folder=cache_folder() / "gemm"
            )
            return {}
        self._loop = self._server = open_server(folder, config, _host(config), cluster_secret(), self._store)
        return published(self._server)

    def observed(self) -> tuple[Any, Any, int]:
        """Measurements of the leading rank, which must have nothing left to do: the meter of the stages' time (then
        reset), the cost models of steps, and the capacity of the KV cache in tokens."""
        assert self._server is not None
        observed: tuple[Any, Any, int] = self._server.at_rest(_observed)
        return observed

    def alive(self) -> Pulse:
        """Answers at once, whatever `run` is doing, unless the whole process hangs."""
        who = f"pid: {os.getpid()}, ip: {ray.util.get_node_ip_address()}"
        # The leading rank's loop waits for the loops of the others, so its progress stands for all.
        if self._server is not None:
            executor = self._server.engine.executor
            return Pulse(who, self._server.progress, executor.newest_steps, tuple(executor.silent_ranks))
        return Pulse(who, steps=None if self._follower is None else self._follower.newest_steps)

    def farewell(self, message: str) -> bool:
        """On the leading rank: tells routers that the replica ends because it hangs. Returns whether it could."""
        return self._server is not None and self._server.farewell("hung", message)

    def drain(self, within_s: float) -> None:
        """On the leading rank: takes the replica away. `run` returns when its requests have ended, at the latest after
        `within_s` seconds."""
        assert self._server is not None
        self._server.drain(within_s)

    def run(self) -> None:
        """Runs the rank's loop. Raises the error that ends it."""
        if self._loop is None:
            raise RuntimeError("call load before run")
        run_steps(self._serve, self._loop.device)

    def _serve(self) -> None:
        assert self._loop is not None
        if self._server is not None:
            self._server.warm_up()
        self._loop.run()


def _observed(engine: "Engine") -> tuple[Any, Any, int]:
    meter = engine.meter()
    observed = copy.deepcopy((meter, engine.costs.models))
    meter.reset()
    return *observed, engine.executor.num_pages * engine.executor.page_size


def _host(config: ReplicaConfig) -> str:
    return config.replica_host or str(ray.util.get_node_ip_address())
