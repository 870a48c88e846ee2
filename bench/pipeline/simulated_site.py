"""Loads on a simulated pipeline: the worker's own scheduler, and stages that take the time that a model of their costs
says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load.workload import Vocabulary
from bench.pipeline.layout import ParallelLayout, Setting
from bench.pipeline.load_generator import Offered, OfferedLoad, summary
from bench.pipeline.meter_report import keep, metered
from bench.pipeline.simulated_replica import SimulatedReplica
from bench.pipeline.simulator import Hardware, Request, SimulatedClock, simulate
from pipeline.cost import CostModel
from pipeline.padding import PaddedSizes
from pipeline.roofline import DEVICES, LINKS, MODELS, DeviceSpec, LinkSpec, ModelSpec, make_stages
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore


@dataclass(frozen=True)
class Machines:
    """Nodes of `per_node` devices. `inside` joins the devices of a node, `between` joins nodes."""

    model: ModelSpec
    device: DeviceSpec
    inside: LinkSpec
    between: LinkSpec
    nodes: int
    per_node: int

    def hardware(self, layout: ParallelLayout, rows: PaddedSizes) -> Hardware:
        """The stages of a layout by the roofline model. `rows`: number of rows that a step computes.

        A stage larger than a node has its all-reduces between nodes. In a layout larger than a node, all traffic
        between stages is assumed to leave the node. Raises ValueError for a layout that these machines cannot hold.
        """
        if layout.devices > self.nodes * self.per_node:
            raise ValueError(f"{layout} needs {layout.devices} devices: there are {self.nodes * self.per_node}")
        sums = self.inside if layout.tp <= self.per_node else self.between
        stages = make_stages(self.model, self.device.sustained(), layout.pp, layout.tp, sums, rows)
        link = self.between if layout.devices > self.per_node else self.inside
        return Hardware([stage.seconds for stage in stages], link, self.model.token_bytes, jitter=0.02)

    def kv_tokens(self, layout: ParallelLayout) -> int:
        """Tokens whose KV every stage can hold."""
        sums = self.inside if layout.tp <= self.per_node else self.between
        return min(stage.kv_tokens() for stage in make_stages(self.model, self.device, layout.pp, layout.tp, sums))


PLANS = {
    # As measured on four GPUs of one machine with NCCL restricted to sockets: in effect, one node for each GPU.
    "llama-70b": Machines(MODELS["llama-70b"], DEVICES["h200"], LINKS["nvlink"], LINKS["sockets"], nodes=4, per_node=1),
    # In Sarathi-Serve's largest deployment machines had four A100 each; here they have eight.
    "falcon-180b": Machines(
        MODELS["falcon-180b"], DEVICES["a100"], LINKS["nvlink_a100"], LINKS["ethernet_100g"], nodes=2, per_node=8
    ),
    "llama-405b": Machines(
        MODELS["llama-405b"], DEVICES["h200"], LINKS["nvlink"], LINKS["ethernet_100g"], nodes=2, per_node=8
    ),
}


@dataclass
class SimulatedSite:
    """A simulated site.

    - `hardware`, `kv_tokens`: of a layout.
    - `max_running`: as in a replica's configuration.
    - `rows`: number of rows that the hardware computes for a step.
    - `traces`: folder for traces; None writes none.
    """

    hardware: Callable[[ParallelLayout], Hardware]
    kv_tokens: Callable[[ParallelLayout], int]
    max_running: int
    rows: PaddedSizes
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary(0, 0, 10_000))
    page_size: int = 16
    traces: Path | None = None

    def offer(self, layout: ParallelLayout, setting: Setting, load: OfferedLoad) -> dict[str, Any]:
        """Implements `bench.pipeline.capacity_search.Site`. No load is ended early, as virtual time costs little."""
        hardware, sessions = self.hardware(layout), load.sessions
        settings = {
            "pp": layout.pp,
            "max_running": self.max_running,
            "page_size": self.page_size,
            "context_length": 1 << 20,
            "kv_tokens": self.kv_tokens(layout),
            "max_waiting": max(4096, len(sessions)),
        }
        config = setting.applied(WorkerConfig.model_validate(settings))
        clock = SimulatedClock()
        requests = [
            Request(i, session.arrival_s or 0.0, session.turns[0].prompt_tokens, session.turns[0].output_tokens)
            for i, session in enumerate(sessions)
        ]
        costs = CostStore([CostModel(seconds_of, rows=self.rows) for seconds_of in hardware.stages])
        replica = SimulatedReplica(
            config, costs, clock, lambda request: self.vocabulary.ids(sessions[request.number].turns[0].spans)
        )
        run = simulate(requests, replica, hardware, clock)
        point = summary(Offered(run.lives, run.seconds), load.rate)
        if self.traces is not None:
            keep(run.meter, self.traces, load, point)
        return point | metered(run.meter)
