"""Loads offered to a pipeline in the simulator: the worker's own scheduler, stages that take what cost models say."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.pipelines.layout import Layout, Setting
from bench.pipelines.metered import keep, metered
from bench.pipelines.offered import Load, Offered, summary
from bench.workload import Vocabulary
from pipeline.cost import CostModel
from pipeline.roofline import DEVICES, LINKS, MODELS, Device, Link, Model, make_stages
from pipeline.rows import Rows
from pipeline.simulate import Clock, Hardware, Request, simulate
from worker.config import WorkerConfig
from worker.costs import Costs
from worker.rehearsal import Rehearsal


@dataclass(frozen=True)
class Machines:
    """Nodes of `per_node` devices, joined by `inside` within a node and by `between` from one to another."""

    model: Model
    device: Device
    inside: Link
    between: Link
    nodes: int
    per_node: int

    def hardware(self, layout: Layout, rows: Rows) -> Hardware:
        """The stages of a layout, as the roofline has them; `rows`: those that steps compute. A stage that does not fit
        into a node has its sums between nodes, and all that passes from stage to stage is taken to leave its node.
        Raises ValueError for a layout that these machines cannot hold."""
        if layout.devices > self.nodes * self.per_node:
            raise ValueError(f"{layout} needs {layout.devices} devices: there are {self.nodes * self.per_node}")
        sums = self.inside if layout.tp <= self.per_node else self.between
        stages = make_stages(self.model, self.device.sustained(), layout.pp, layout.tp, sums, rows)
        link = self.between if layout.devices > self.per_node else self.inside
        return Hardware([stage.seconds for stage in stages], link, self.model.token_bytes, jitter=0.02)

    def kv_tokens(self, layout: Layout) -> int:
        """Those that every stage can hold."""
        sums = self.inside if layout.tp <= self.per_node else self.between
        return min(stage.kv_tokens() for stage in make_stages(self.model, self.device, layout.pp, layout.tp, sums))


PLANS = {
    # What is measured on four GPUs of one machine that NCCL has only sockets between: a node each, as it were.
    "llama-70b": Machines(MODELS["llama-70b"], DEVICES["h200"], LINKS["nvlink"], LINKS["sockets"], nodes=4, per_node=1),
    # The machines of Sarathi-Serve's largest deployment had four A100 each; these have eight.
    "falcon-180b": Machines(
        MODELS["falcon-180b"], DEVICES["a100"], LINKS["nvlink_a100"], LINKS["ethernet_100g"], nodes=2, per_node=8
    ),
    "llama-405b": Machines(
        MODELS["llama-405b"], DEVICES["h200"], LINKS["nvlink"], LINKS["ethernet_100g"], nodes=2, per_node=8
    ),
}


@dataclass
class Simulated:
    """A site in the simulator. `hardware` and `kv_tokens` are of a layout; `max_running` as in the configuration;
    `rows` as the hardware computes them of a step. Traces are written into a folder, if there is one."""

    hardware: Callable[[Layout], Hardware]
    kv_tokens: Callable[[Layout], int]
    max_running: int
    rows: Rows
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary(0, 0, 10_000))
    page_size: int = 16
    traces: Path | None = None

    def offer(self, layout: Layout, setting: Setting, load: Load) -> dict[str, Any]:
        """As `bench.pipelines.study.Site`. No load is ended early: virtual time costs little."""
        hardware, sessions = self.hardware(layout), load.sessions
        config = WorkerConfig(
            pp=layout.pp,
            max_running=self.max_running,
            page_size=self.page_size,
            context_length=1 << 20,
            kv_tokens=self.kv_tokens(layout),
            max_waiting=max(4096, len(sessions)),
            **setting.settings,
        )
        clock = Clock()
        requests = [
            Request(i, session.arrival_s or 0.0, session.turns[0].prompt_tokens, session.turns[0].output_tokens)
            for i, session in enumerate(sessions)
        ]
        costs = Costs([CostModel(seconds_of, rows=self.rows) for seconds_of in hardware.stages])
        replica = Rehearsal(
            config, costs, clock, lambda request: self.vocabulary.ids(sessions[request.number].turns[0].spans)
        )
        run = simulate(requests, replica, hardware, clock)
        point = summary(Offered(run.lives, run.seconds), load.rate)
        if self.traces is not None:
            keep(run.meter, self.traces, load, point)
        return point | metered(run.meter)
