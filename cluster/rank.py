"""One process of a replica: the GPU (or the share of the CPU) that one rank of one stage computes on."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from cluster.config import Config
from cluster.models import resolve

if TYPE_CHECKING:
    from worker.server import Server


class Rank:
    """The Ray actor around `worker.server.Server`. `run` holds one of its threads until the loop ends."""

    def __init__(self) -> None:
        self._server: Server | None = None

    def load(self, config: Config) -> dict[str, Any]:
        """Gets the model onto this node if it is not there, loads it, and binds. Returns what routers must know:
        `address` (of ZeroMQ) and `context_length` (in tokens, what the model and the KV cache allow).

        Raises whatever the model's folder, the weights or the device have to complain about.
        """
        from worker.server import Server  # imports torch: only here, the control actor must stay light

        folder: Path = resolve(config.model, weights=config.load_format != "dummy")
        self._server = Server(folder, config, host=config.replica_host or ray.util.get_node_ip_address())
        return {"address": self._server.address, "context_length": self._server.engine.scheduler.context_length}

    def run(self) -> None:
        """The scheduler's loop. Returns after `stop`, raises if the loop fails."""
        self._loaded().run()

    def _loaded(self) -> "Server":
        if self._server is None:
            raise RuntimeError("load comes first")
        return self._server
