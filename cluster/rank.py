"""One process of a replica: the GPU (or the share of the CPU) that one rank of one stage computes on."""

import copy
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from cluster.config import Config
from cluster.folders import cache_folder
from cluster.models import resolve

if TYPE_CHECKING:
    from torch.distributed import Store

    from worker.engine import Engine
    from worker.ranks import Follower
    from worker.server import Server


class Rank:
    """The Ray actor around `worker.server.Server` on a replica's leading rank, around `worker.ranks.Follower` on the
    others. `run` holds one of its threads until the loop ends."""

    def __init__(self) -> None:
        self._loop: Server | Follower | None = None
        self._store: Store | None = None

    def open(self, config: Config) -> str | None:
        """Of the leading rank, before any loads: where all of them will meet, or None for one that is alone."""
        if config.num_ranks == 1:
            return None
        from worker.ranks import open_store  # imports torch: only here, the control actor must stay light

        self._store, address = open_store(_host(config))
        return address

    def load(self, config: Config, rank: int = 0, meeting: str | None = None) -> dict[str, Any]:
        """Gets the model onto this node if it is not there, loads this rank's part together with the other ranks, and
        binds. `meeting` is what the leading rank's `open` returned. Returns what routers must know of that one:
        `address` (of ZeroMQ) and `context_length` (in tokens, what the model and the KV cache allow).

        Raises whatever the model's folder, the weights or the device have to complain about.
        """
        from worker.engine import load_parts
        from worker.ranks import Follower, Leader, find_store
        from worker.server import Server

        folder: Path = resolve(config.model, weights=config.load_format != "dummy")
        host = _host(config)
        if rank != config.leading_rank:
            assert meeting is not None
            self._loop = Follower(folder, config, rank, find_store(meeting))
            return {}
        load = partial(load_parts, cost_folder=cache_folder() / "costs")
        if self._store is not None:
            load = partial(load, open_runner=partial(Leader, store=self._store, host=host))
        self._loop = server = Server(folder, config, host=host, load=load)
        return {"address": server.address, "context_length": server.engine.scheduler.context_length}

    def observed(self) -> tuple[Any, Any, int]:
        """Of the leading rank, when it has nothing to do any more: the meter of the stages' time, which then begins
        anew; the models of what steps cost; and how many tokens the KV cache holds."""
        from worker.server import Server

        assert isinstance(self._loop, Server)
        observed: tuple[Any, Any, int] = self._loop.at_rest(_observed)
        return observed

    def alive(self) -> str:
        """Who answers, for people: at once, whatever `run` is doing, unless the whole process hangs."""
        return f"pid: {os.getpid()}, ip: {ray.util.get_node_ip_address()}"

    def run(self) -> None:
        """The rank's loop. Raises what it cannot go on after."""
        if self._loop is None:
            raise RuntimeError("load comes first")
        self._loop.run()


def _observed(engine: "Engine") -> tuple[Any, Any, int]:
    meter = engine.meter()
    observed = copy.deepcopy((meter, engine.costs.models))
    meter.reset()
    return *observed, engine.runner.num_pages * engine.runner.page_size


def _host(config: Config) -> str:
    return config.replica_host or str(ray.util.get_node_ip_address())
