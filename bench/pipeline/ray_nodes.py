"""Replicas on several Ray nodes, with the stages of a replica spread over them: nodes of a cluster that runs, or nodes
that are started on this machine."""

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import zmq
from ray._private.state import available_resources_per_node
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bench.pipeline.layout import ParallelLayout, Setting
from bench.replica import dummy_models, link_speed
from cluster import local
from cluster.config import Config
from cluster.plane import cluster_secret
from cluster.replica import bundles, start_ranks
from pipeline.cost import CostModel
from pipeline.meter import Meter
from worker.curve import REPLICA, Curve
from worker.messages import Abort, Generate, Output, Outputs, decode_from_replica, encode

if TYPE_CHECKING:
    from worker.parallel.rank_store import Meeting

Result = TypeVar("Result")

START_S = 600.0
FREE_S = 20.0  # how long Ray may take to give back what a replica before this one had
STORE_BYTES = 80 << 20  # Ray's object store, which is not used here
ON_NODE = "ray.io/node-id"  # a label that Ray gives every node
ROUNDING = 1e-4  # resources are counted in ten-thousandths


class Nodes:
    """A Ray cluster, of which this process is part."""

    def __init__(self, own: Cluster | None = None) -> None:
        """`own`: the cluster, if it ends with this."""
        self._own = own
        self._copies: list[Path] = []
        self._free: dict[str, Mapping[str, float]] | None = None  # by node, before the first replica

    @classmethod
    def joined(cls, address: str) -> "Nodes":
        """The cluster at host:port, or "auto": the one that this machine is part of. Raises RuntimeError."""
        local.join_or_tell(address)
        return cls()

    @classmethod
    def started(cls, count: int, layouts: list[ParallelLayout], on_gpu: bool) -> "Nodes":
        """Nodes on this machine, which share evenly the devices of the largest of `layouts`."""
        each = -(-max(layout.devices for layout in layouts) // count)
        cluster = Cluster()
        for node in range(count):
            options: dict[str, Any] = {"num_gpus": each} if on_gpu else {}
            # Otherwise all nodes would number this machine's GPUs from the first.
            seen = ",".join(str(node * each + i) for i in range(each))
            cluster.add_node(
                num_cpus=each + 1,  # an integer: the control actor needs part of the extra one
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                env_vars={"CUDA_VISIBLE_DEVICES": seen if on_gpu else ""},
                **options,
            )
        ray.init(address=cluster.address, log_to_driver=False)
        return cls(cluster)

    def device(self, asked: str) -> str:
        """The device of replicas. `asked`: cpu, cuda or auto, a GPU if there is any."""
        return ("cuda" if ray.cluster_resources().get("GPU") else "cpu") if asked == "auto" else asked

    def count(self) -> int:
        """How many nodes live now."""
        return len(_alive())

    def stages(self, config: Config) -> list[str]:
        """The nodes of a replica's stages, by id, as `spread` chooses them among those with room. Raises ValueError."""
        control, stage = bundles(config)[:2]
        deadline = time.monotonic() + FREE_S
        while True:
            seen = available_resources_per_node()
            free = {node: seen.get(node, {}) for node in _alive()}
            if self._free is None:
                self._free = free
            # Before a replica has given everything back, all stages of the next one would go where it had none.
            is_back = all(
                free[node].get(name, 0) + ROUNDING > there.get(name, 0)
                for node, there in self._free.items()
                for name in stage
                if node in free
            )
            is_late = time.monotonic() > deadline
            if is_back or is_late:
                try:
                    # The control actor's bundle goes to the first stage's node, whichever that is.
                    return spread(
                        {
                            node: {name: amount - control.get(name, 0) for name, amount in there.items()}
                            for node, there in free.items()
                        },
                        stage,
                        config.pp,
                    )
                except ValueError:
                    if is_late:
                        raise
            time.sleep(0.2)

    def call(self, function: Callable[..., Result], *arguments: Any, gpus: int = 0) -> Result:
        """Runs `function` on a node. `gpus`: how many it may use there."""
        result: Result = ray.get(ray.remote(function).options(num_cpus=0, num_gpus=gpus).remote(*arguments))
        return result

    def write(self, model: str, folder: Path) -> None:
        """Writes a model of `bench.replica.dummy_models` to the same folder on all nodes. `close` removes it, with the
        folder above."""
        self._copies.append(folder.parent)
        self._everywhere(dummy_models.write, model, folder)

    def link(self, device: str) -> link_speed.Speed:
        """The speed of the link between the nodes of two stages, or between two processes of the only node."""
        need = {"GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
        free = available_resources_per_node()
        ends = [_End.options(**_on(node), num_gpus=need.get("GPU", 0)).remote() for node in spread(free, need, 2)]  # type: ignore[attr-defined]
        try:
            meeting = ray.get(ends[0].open.remote())
            found = ray.get([end.run.remote(rank, meeting, device) for rank, end in enumerate(ends)], timeout=START_S)
        finally:
            for end in ends:
                ray.kill(end)
        return link_speed.fit(found[0])

    def close(self) -> None:
        for folder in self._copies:
            self._everywhere(shutil.rmtree, folder, True)
        ray.shutdown()
        if self._own is not None:
            self._own.shutdown()

    def _everywhere(self, function: Callable[..., Any], *arguments: Any) -> None:
        ray.get([ray.remote(function).options(**_on(node)).remote(*arguments) for node in _alive()])


@ray.remote(num_cpus=0)
class _End:
    """An end of a link."""

    def open(self) -> "Meeting":
        from worker.parallel.rank_store import open_store

        self._store, meeting = open_store(ray.util.get_node_ip_address())
        return meeting

    def run(self, rank: int, meeting: "Meeting", device: str) -> dict[int, float]:
        return link_speed.one_end(rank, meeting, device)


def _alive() -> list[str]:
    """The ids of all nodes, in the order of their addresses."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [node["NodeID"] for node in sorted(nodes, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))]


def _on(node: str) -> dict[str, Any]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def spread(free: Mapping[str, Mapping[str, float]], stage: Mapping[str, float], count: int) -> list[str]:
    """The nodes of `count` stages: on as many nodes as have room, as evenly as can be, neighbours together. `free` has
    the free resources by node, and `stage` those that a stage needs. Raises ValueError if there is no room."""
    room = {
        node: min(int((there.get(name, 0) + ROUNDING) / needed) for name, needed in stage.items())
        for node, there in free.items()
    }
    if sum(room.values()) < count:
        needed = ", ".join(f"{amount:g} {name}" for name, amount in stage.items())
        raise ValueError(
            f"{count} stages need {needed} each, and the {len(room)} nodes have room for {sum(room.values())}: name "
            "other --layouts, or end what uses the nodes (shoal stop)"
        )
    given = dict.fromkeys(room, 0)
    for _ in range(count):
        given[min((node for node in given if given[node] < room[node]), key=given.__getitem__)] += 1
    return [node for node, stages in given.items() for _ in range(stages)]


class Remote:
    """A replica started by Ray, as a `bench.pipeline.real_site.MeteredReplica`: used as a router uses it."""

    def __init__(self, leader: Any, address: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._leader = leader
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        Curve(cluster_secret(), REPLICA).calls(self._socket)
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
    """A `bench.pipeline.real_site.ReplicaSource` on nodes. Every setting has its own replica."""

    def __init__(self, nodes: Nodes, folder: Path, settings: dict[str, Any], on_gpu: bool) -> None:
        """`settings`: of every replica of the model in `folder`, which all nodes have."""
        self._nodes, self._folder, self._settings, self._on_gpu = nodes, folder, settings, on_gpu
        self._under: tuple[ParallelLayout, Setting] | None = None
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._target: Remote | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def config(self, layout: ParallelLayout) -> Config:
        ranks = {"device": "cuda" if self._on_gpu else "cpu", "tp": layout.tp, "pp": layout.pp, "cpus_per_rank": 1}
        return Config(model=str(self._folder), **self._settings | ranks)

    def check(self, layouts: list[ParallelLayout]) -> None:
        """Raises ValueError if the nodes have no room for one of `layouts`."""
        for layout in layouts:
            self._nodes.stages(self.config(layout))

    def under(self, layout: ParallelLayout, setting: Setting) -> tuple[Remote, bool]:
        if self._target is not None and self._under == (layout, setting):
            return self._target, False
        self._end()
        config = setting.applied(self.config(layout))
        where = [{ON_NODE: node} for node in self._nodes.stages(config)]
        # The first bundle is the control actor's, of which there is none here.
        self._group = placement_group(bundles(config), strategy="PACK", bundle_label_selector=[where[0], *where])
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

    def _end(self) -> None:
        if self._target is not None:
            self._target.close()
        for rank in self._actors:
            ray.kill(rank)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self._target, self._actors, self._group = None, [], None
