"""Replicas on several Ray nodes, all of them on this machine, with the stages of a replica on different nodes."""

from pathlib import Path
from typing import Any

import ray
import zmq
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup

from bench.pipeline.layout import ParallelLayout, Setting
from cluster.config import Config
from cluster.replica import bundles, start_ranks
from pipeline.cost import CostModel
from pipeline.meter import Meter
from worker.messages import Abort, Generate, Output, Outputs, decode_from_replica, encode

START_S = 600.0
STORE_BYTES = 80 << 20  # Ray's object store, which is not used here


class Remote:
    """A replica started by Ray, as a `bench.pipeline.real_site.MeteredReplica`: used as a router uses it."""

    def __init__(self, leader: Any, address: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._leader = leader
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self.kv_tokens = ray.get(leader.observed.remote())[2]

    def add(self, request: Generate) -> None:
        self._socket.send(encode(request))

    def take_outputs(self, wait_s: float) -> list[Output]:
        outputs: list[Output] = []
        timeout_ms = max(0, round(wait_s * 1000))
        while self._socket.poll(timeout_ms):
            message = decode_from_replica(self._socket.recv())
            if isinstance(message, Outputs):
                outputs += message.outputs
            timeout_ms = 0
        return outputs

    def abort(self, request_ids: list[str]) -> None:
        self._socket.send(encode(Abort(request_ids)))

    def settle(self) -> None:
        self.observed()
        self.take_outputs(0.0)  # drops outputs of aborted requests

    def observed(self) -> tuple[Meter, list[CostModel]]:
        meter, models, _ = ray.get(self._leader.observed.remote())
        return meter, models

    def close(self) -> None:
        self._socket.close()


class RayNodes:
    """A `bench.pipeline.real_site.ReplicaSource` on `count` nodes, which share evenly the devices of the largest of
    `layouts`. Every setting has its own replica."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], count: int, layouts: list[ParallelLayout], on_gpu: bool
    ) -> None:
        self._folder, self._settings, self._on_gpu = folder, settings, on_gpu
        self._under: tuple[ParallelLayout, Setting] | None = None
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._target: Remote | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        each = -(-max(layout.devices for layout in layouts) // count)
        self._cluster = Cluster()
        for node in range(count):
            options: dict[str, Any] = {"num_gpus": each} if on_gpu else {}
            # Otherwise all nodes would number this machine's GPUs from the first.
            seen = ",".join(str(node * each + i) for i in range(each))
            self._cluster.add_node(
                num_cpus=each + 1,  # an integer: the control actor needs part of the extra one
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                env_vars={"CUDA_VISIBLE_DEVICES": seen if on_gpu else ""},
                **options,
            )
        ray.init(address=self._cluster.address, log_to_driver=False)

    def under(self, layout: ParallelLayout, setting: Setting) -> tuple[Remote, bool]:
        if self._target is not None and self._under == (layout, setting):
            return self._target, False
        self._end()
        ranks = {"device": "cuda" if self._on_gpu else "cpu", "tp": layout.tp, "pp": layout.pp, "cpus_per_rank": 1}
        config = setting.applied(Config(model=str(self._folder), **self._settings | ranks))
        self._group = ray.util.placement_group(bundles(config), strategy="PACK")
        ray.get(self._group.ready(), timeout=START_S)
        self._actors = start_ranks(config, self._group)
        leader = self._actors[config.leading_rank]
        meeting: Any = ray.get(leader.open.remote(config), timeout=START_S)
        loads = [rank.load.remote(config, i, meeting) for i, rank in enumerate(self._actors)]
        published = ray.get(loads, timeout=START_S)[config.leading_rank]
        for rank in self._actors:
            rank.run.remote()
        self._under, self._target = (layout, setting), Remote(leader, published["address"], self._context)
        return self._target, True

    def close(self) -> None:
        self._end()
        self._context.term()
        ray.shutdown()
        self._cluster.shutdown()

    def _end(self) -> None:
        if self._target is not None:
            self._target.close()
        for rank in self._actors:
            ray.kill(rank)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self._target, self._actors, self._group = None, [], None
