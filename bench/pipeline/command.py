"""Measures pipelines of several stages: the load that they carry, and what their stages wait for, by layout and
schedule.

    shoal bench pipeline --model llama-70b --layouts pp4,tp4,tp2pp2 --link sockets --name pipeline.sockets
    shoal bench pipeline --model llama-70b --layouts pp4,tp4 --traffic '' --max-running 1024 --jobs mini_1024
    shoal bench pipeline                         without a GPU: a small model in two stages, takes some minutes
    shoal bench pipeline --device cpu --layouts pp2,tp2 --schedules uniform --jobs mini_half
    shoal bench pipeline --device cpu --layouts pp2 --nodes 2 --schedules uniform
    shoal bench pipeline --model llama-70b --layouts tp8pp2 --address auto       on the machines of a Ray cluster
    shoal bench pipeline --plan falcon-180b --objectives strict,relaxed

Models have random weights. Sampling is greedy, and every output has its full length. Requests arrive as a Poisson
process with the lengths of Sarathi-Serve's two workloads (chat and long), or as in a trace. Requests of --jobs all
arrive at once, under the schedule `offline`.

The capacity of a layout with a schedule is the highest rate of requests at which

    - the 99th percentile of the time between tokens is at most 5 (strict) or 25 (relaxed) decode iterations;
    - half of the requests are scheduled within --delay seconds.

A decode iteration is that of 32 sequences of 4,096 tokens (divided by --shrink) on the first layout. The capacity is
found by bisection. The search begins at the capacity that the simulator predicts from the measured costs of steps. For
other schedules and layouts it goes down to an eighth of the capacity of `uniform` on the first layout. If even the
highest rate tried is carried (>=), there is no figure: use more --requests or --seconds.

A CPU has defaults of its own, also with --device cpu: a model large enough to keep it busy, short requests and a short
delay, so that a load of some seconds can be too much. They show the schedules at work, not the performance of a GPU.

Every load is written to the result file as soon as it has been measured. An interrupted run continues when the same
command is given again. A file made with other settings is not overwritten: --name writes another file, --fresh replaces
the old one. Time lines of the stages, as pictures and as traces for https://ui.perfetto.dev, are written to the folder
of --traces.

With --plan nothing is measured: the machines are simulated, with the real scheduler.
"""

import argparse
import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import results
from bench.load.options import count, on_gpu, positive
from bench.load.workload import Vocabulary
from bench.pipeline.capacity import DELAY_S
from bench.pipeline.capacity_search import OBJECTIVES, OURS, SIMULATED, CapacitySearch, Site
from bench.pipeline.experiment_grid import MIN_CAPACITY_SHARE, ExperimentGrid, print_rows
from bench.pipeline.figures import Findings, Twin, measured_link
from bench.pipeline.layout import SCHEDULES, ParallelLayout, Setting
from bench.pipeline.meter_report import draw_kept
from bench.pipeline.result_store import ResultStore, say
from bench.pipeline.simulated_site import PLANS, SimulatedSite
from bench.pipeline.simulator import errors
from bench.pipeline.traffic import OFFLINE, PUBLISHED, Traffic, offline, published, traced
from bench.replica import dummy_models, link_speed
from bench.replica.offline_workloads import MAX_TOKEN_ID
from bench.results import number
from bench.targets import print_table
from pipeline.padding import PaddedSizes
from pipeline.shape import FEATURES
from shoal import flags
from shoal.help import Parser
from worker.config import WorkerConfig

if TYPE_CHECKING:
    import torch

    from bench.pipeline.ray_nodes import Nodes
    from bench.pipeline.real_site import ReplicaSource

LINKS = ("nvlink", "sockets")
MEASURED = ("model", "link", "nodes", "address")  # options for real machines only
PLANNED_AND_MEASURED = "simulated.llama-70b", "pipeline.sockets"  # names of results on the same machines
VARIED = {"tp", "pp", "schedule", "tbt_slo", "load_format"}
PLANNED_BUDGET, PLANNED_RUNNING = 8192, 256
MAX_LEARNED_REQUESTS = 32  # most requests from which the costs of steps are learned
AIMED = "llama-70b", 4  # model and number of devices of the figures with targets
MAX_CONTEXT_TOKENS = max(workload.most for workload in PUBLISHED.values())
DEFAULTS: dict[str, Any] = {
    "model": "tiny",
    "link": "nvlink",
    "nodes": 0,
    "schedules": list(SCHEDULES),
    "objectives": ["strict"],
    "requests": 128,
    "seconds": 120.0,
    "delay": DELAY_S,
    "shrink": 1,
    "chunk_budgets": [256, 512, 1024, 2048],
    "precision": 0.05,
    "out": results.FOLDER,
}
# Tuned on two cores, which carry about twenty of these requests a second in loads of eight seconds. At a rate that is a
# seventh too high, the median request waits for half a second by the end of the load. So the capacity lies within the
# range that is searched, also on machines several times as fast. The relaxed objective tolerates variations of the time
# between tokens by other processes.
ON_CPU: dict[str, Any] = {
    "model": "small",
    "schedules": ["uniform", "fixed_chunk"],
    "objectives": ["relaxed"],
    "seconds": 8.0,
    "delay": 0.5,
    "shrink": 32,
    "chunk_budgets": [128, 512],
    "precision": 0.15,
    "out": Path("shoal-bench"),
}
REPLICA_ON_CPU = {"kv_tokens": 65536}


def parser() -> Parser:
    """The command line. Every setting of a replica that the benchmark does not vary is a flag."""
    p = Parser("shoal bench pipeline", __doc__)
    what = p.add_argument_group("what is measured")
    what.add_argument("--plan", choices=sorted(PLANS), help="simulate these machines instead")
    what.add_argument("--model", choices=sorted(dummy_models.SHAPES), help=f"shape {_default('model')}")
    what.add_argument(
        "--layouts", type=_some(ParallelLayout.parse), metavar="A,B", help="tp4,pp4,tp2pp2 (default: pp2)"
    )
    what.add_argument(
        "--schedules",
        type=_among(SCHEDULES),
        metavar="A,B",
        help=f"default: all; on a CPU {', '.join(ON_CPU['schedules'])}",
    )
    what.add_argument("--traffic", type=_among(PUBLISHED), default="long", metavar="A,B", help="chat, long (default)")
    what.add_argument("--trace", type=Path, metavar="FILE", help="lengths and arrivals of a trace, in addition")
    what.add_argument(
        "--jobs", type=_among(OFFLINE), default="", metavar="A,B", help=f"all at once: {', '.join(OFFLINE)}"
    )
    what.add_argument(
        "--objectives", type=_among(OBJECTIVES), metavar="A,B", help=f"strict, relaxed {_default('objectives')}"
    )
    what.add_argument("--requests", type=count, metavar="N", help=f"of a load, at most {_default('requests')}")
    what.add_argument("--seconds", type=positive, metavar="S", help=f"in which they arrive {_default('seconds')}")
    what.add_argument("--delay", type=positive, metavar="S", help=f"until half are scheduled {_default('delay')}")
    what.add_argument("--shrink", type=count, metavar="N", help=f"divide all lengths by N {_default('shrink')}")
    what.add_argument(
        "--chunk-budgets", type=_some(count), metavar="N,M", help=f"of fixed_chunk {_default('chunk_budgets')}"
    )
    what.add_argument("--precision", type=positive, metavar="X", help=f"of a capacity {_default('precision')}")
    what.add_argument("--seed", type=int, default=0, help="of lengths and arrivals (default: 0)")
    where = p.add_argument_group("where")
    where.add_argument("--link", choices=LINKS, help=f"what NCCL may use {_default('link')}")
    nodes = where.add_mutually_exclusive_group()
    nodes.add_argument("--nodes", type=_none_or_count, metavar="N", help="through Ray, on N nodes of this machine")
    nodes.add_argument(
        "--address", metavar="HOST:PORT", help="on the nodes of this Ray cluster; auto: of the one that runs here"
    )
    out = p.add_argument_group("what comes of it")
    out.add_argument("--name", help="of the result (default: as its figures' names begin)")
    out.add_argument("--out", type=Path, metavar="DIR", help="default: bench/results; on a CPU shoal-bench")
    out.add_argument("--traces", type=Path, default=Path("shoal-bench"), metavar="DIR", help="default: %(default)s")
    out.add_argument("--fresh", action="store_true", help="measure again what is there already")
    flags.add(p, WorkerConfig, without=VARIED)
    return p


def _default(name: str) -> str:
    values = [DEFAULTS[name], *([ON_CPU[name]] if name in ON_CPU else [])]
    return f"(default: {'; on a CPU '.join(map(_typed, values))})"


def _typed(value: Any) -> str:
    """A value as a user would type it."""
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _list(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Parser of a list separated by commas, without duplicates: these would give every figure twice."""

    def parse_all(text: str) -> list[Any]:
        try:
            return list(dict.fromkeys(parse(word) for word in text.split(",") if word))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_all


def _some(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse_some(text: str) -> list[Any]:
        if not (found := _list(parse)(text)):
            raise argparse.ArgumentTypeError(f"{text!r} names none")
        return found

    return parse_some


def _none_or_count(text: str) -> int:
    return 0 if text == "0" else count(text)


def _among(names: Iterable[str]) -> Callable[[str], list[str]]:
    def one(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return _list(one)


def main(argv: list[str] | None = None) -> int:
    """Measures or plans, prints tables and writes the result file. Returns the exit code: 1 if something failed."""
    args = parser().parse_args(argv)
    try:
        settings = flags.given(args, WorkerConfig)
        if args.plan:
            _complete(args, settings, on_cpu=False)
            return plan(args, settings)
        with _joined(args.address) as nodes:
            if nodes is not None:
                settings["device"] = nodes.device(settings.get("device", "auto"))
            _complete(args, settings, on_cpu=settings["device"] == "cpu" if nodes else not on_gpu(settings))
            return measure(args, settings, nodes)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"shoal bench pipeline: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _joined(address: str | None) -> "Iterator[Nodes | None]":
    """The nodes of the Ray cluster at `address`; None if none is given."""
    if address is None:
        yield None
        return
    from bench.pipeline.ray_nodes import Nodes

    with contextlib.closing(Nodes.joined(address)) as nodes:
        yield nodes


def _complete(args: argparse.Namespace, settings: dict[str, Any], on_cpu: bool) -> None:
    """Fills in the defaults, and prints those of a CPU. Raises ValueError for options that have no effect."""
    given = [name for name in MEASURED if getattr(args, name) is not None]
    if args.plan and (idle := [*given, *sorted(settings.keys() - {"max_running"})]):
        flag = f"--{idle[0].replace('_', '-')}"
        raise ValueError(
            f"{flag} does nothing with --plan, whose machines, models and replicas are given: leave it out"
        )
    if args.address and args.link:
        raise ValueError("--link does nothing with --address, where the nodes' own network is measured: leave it out")
    usual = DEFAULTS | ON_CPU if on_cpu else DEFAULTS
    chosen = {name: value for name, value in usual.items() if getattr(args, name) is None}
    for name, value in chosen.items():
        setattr(args, name, value)
    if on_cpu:
        replica = {name: value for name, value in REPLICA_ON_CPU.items() if name not in settings}
        settings |= replica
        said = {name: value for name, value in chosen.items() if name in ON_CPU} | replica
        options = (f"--{name.replace('_', '-')} {_typed(value)}" for name, value in said.items())
        say(f"on a CPU, where nothing else is said: {' '.join(options)}")


def _described(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Settings on which points depend and that are not in their keys."""
    same = ("requests", "seconds", "shrink", "seed")
    if args.trace:
        more["trace"] = hashlib.sha256(args.trace.read_bytes()).hexdigest()
    if args.delay != DELAY_S:
        more["delay"] = args.delay
    return {name: getattr(args, name) for name in same} | more


def _loads(args: argparse.Namespace) -> tuple[list[Traffic], list[Traffic]]:
    """The traffics, and the jobs. Raises ValueError if there are none, or if a trace cannot be used."""
    traffics = [published(name, args.requests, args.seed, args.shrink) for name in args.traffic]
    if args.trace:
        traffics.append(traced(args.trace, args.requests, args.seed, args.shrink, MAX_CONTEXT_TOKENS // args.shrink))
    jobs = [offline(name, args.shrink) for name in args.jobs]
    if not traffics and not jobs:
        raise ValueError("there is nothing to offer: name some --traffic, a --trace or --jobs")
    return traffics, jobs


def _sweep(args: argparse.Namespace, name: str, about: dict[str, Any]) -> ResultStore:
    """The result store called `--name`, by default `name`. Raises ValueError if nothing can be written."""
    _make(args.out, "--out")
    sweep = ResultStore(args.name or name, args.out, about, args.fresh)
    _make(args.traces / sweep.name, "--traces")
    return sweep


def _make(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"nothing can be written there: {error}; name another folder with {option}") from error


def _study(args: argparse.Namespace, sweep: ResultStore, site: Site, budget: int, most_running: int) -> CapacitySearch:
    made = CapacitySearch(
        sweep, site, budget, args.chunk_budgets, most_running, args.shrink, args.precision, args.seconds
    )
    return replace(made, progress=SIMULATED) if args.plan else made


def _conclude(args: argparse.Namespace, sweep: ResultStore, survey: ExperimentGrid, findings: Findings) -> int:
    """Writes, prints and draws the results."""
    survey.report(findings)
    sweep.figures = findings.figures
    sweep.raw |= {"capacities": survey.rows(), "missed": findings.reasons, "bounds": findings.bounds}
    path = sweep.write()
    print_rows(survey.rows(), survey.meanings())
    print_table(findings.figures, path, findings.reasons)
    for figure, why in findings.bounds.items():
        print(f"{figure} is a bound, {why}")
    picture = args.traces / sweep.name / "stages.png"
    if draw_kept(picture.parent, survey.time_lines(), picture, sweep.name):
        print(f"time lines of the stages: {picture}, and next to it traces for https://ui.perfetto.dev")
    return 0


# ---------------------------------------------------------------- real machines


def measure(args: argparse.Namespace, settings: dict[str, Any], nodes: "Nodes | None" = None) -> int:
    """Runs the benchmark on real ranks: of this machine, or of `nodes`."""
    import torch

    from bench.pipeline.real_site import RealSite
    from worker.engine.cost_store import rows_of

    layouts = args.layouts or [ParallelLayout(1, 2)]
    settings = {"load_format": "dummy", "context_length": max(1024, MAX_CONTEXT_TOKENS // args.shrink)} | settings
    if nodes is None:
        configs, dtype = settled(args.model, settings, layouts)
    else:  # this machine may have no GPU
        gpus = int(settings["device"] == "cuda")
        configs, dtype = nodes.call(settled, args.model, settings, layouts, gpus=gpus)
    config = configs[0]
    device = torch.device(config.device)
    on_gpu = device.type == "cuda"
    traffics, jobs = _loads(args)
    link = "network" if nodes else args.link
    if on_gpu and link == "sockets":
        os.environ.update(link_speed.SOCKETS)
    prefix, base = (f"pipeline.{link}", "pipeline") if on_gpu else ("cpu.pipeline", "cpu.pipeline")
    if on_gpu and (args.model, layouts[0].devices) != AIMED:
        prefix += f".{args.model}.{layouts[0]}"
    where = {"link": link if on_gpu or nodes else "gloo", "nodes": nodes.count() if nodes else args.nodes}
    about = _described(args, model=args.model, replica=settings, features=FEATURES, **where)
    with dummy_models.written(args.model) as folder:
        _check(folder, configs, on_gpu and nodes is None)
        sweep = _sweep(args, prefix, about)
        measured = nodes.link if nodes else link_speed.measure
        speed = sweep.point("link", lambda: asdict(measured(device.type)))
        say(f"link: {number(speed['bytes_per_s'] / 1e9)} GB/s, {number(speed['latency_s'] * 1e6)} us")
        with _targets(args, nodes, folder, settings, layouts, on_gpu) as targets:
            # Only this machine's meters of energy can be read.
            metered = on_gpu and nodes is None
            site = RealSite(targets, Vocabulary(args.seed, 0, MAX_TOKEN_ID), args.traces / sweep.name, metered)
            study = _study(args, sweep, site, config.token_budget, config.max_running)
            known = published("long", min(args.requests, MAX_LEARNED_REQUESTS), args.seed + 1, args.shrink).at_once()
            ours = Setting(OURS, config.token_budget)
            learned = sweep.point(f"{layouts[0]}/calibration", lambda: site.calibrate(layouts[0], ours, known))
            token_bytes = dummy_models.SHAPES[args.model].config["hidden_size"] * dtype.itemsize
            twin = Twin.of(learned, measured_link(speed), token_bytes, config.max_running, rows_of(config, device))
            study.expected = twin.expected(study, layouts[0])
            survey = ExperimentGrid(
                study, layouts, args.schedules, traffics, jobs, args.objectives, MIN_CAPACITY_SHARE, args.delay
            )
            survey.run()
            findings = Findings(study, layouts[0], survey.whole, prefix, base, twin)
            findings.link(speed)
            findings.meter(survey.floods)
            sweep.raw["simulator"] = findings.simulator(survey.floods)
            return _conclude(args, sweep, survey, findings)


def settled(
    model: str, settings: dict[str, Any], layouts: list[ParallelLayout]
) -> "tuple[list[WorkerConfig], torch.dtype]":
    """The configurations of a shape's replicas by layout, with the device of the machine that this runs on and its
    defaults, and the dtype."""
    from worker.executor.gpu_defaults import resolve_device, with_gpu_defaults

    device, dtype = resolve_device(WorkerConfig(**settings, tp=layouts[0].tp, pp=layouts[0].pp))
    settings = settings | {"device": device.type}
    with dummy_models.written(model) as folder:
        configs = [WorkerConfig(**settings, tp=layout.tp, pp=layout.pp) for layout in layouts]
        return [with_gpu_defaults(config, folder) for config in configs], dtype


def _check(folder: Path, configs: list[WorkerConfig], on_gpu: bool) -> None:
    """Raises ValueError if the model in `folder` has too few layers or heads for the ranks, or if this machine, with
    `on_gpu`, has too few GPUs."""
    import torch

    from worker.models.config import decoder_config, read_config
    from worker.models.sharding import Shard

    whole = decoder_config(read_config(folder))
    for config in configs:
        Shard(
            whole,
            size=config.tp,
            stages=config.pp,
            cut=config.cut,
            expert_parallel=config.enable_expert_parallel,
        )
        if on_gpu and (gpus := torch.cuda.device_count()) < config.num_ranks:
            raise ValueError(f"tp={config.tp}, pp={config.pp}, but this machine has {gpus} GPUs: name other --layouts")


@contextlib.contextmanager
def _targets(
    args: argparse.Namespace,
    nodes: "Nodes | None",
    folder: Path,
    settings: dict[str, Any],
    layouts: list[ParallelLayout],
    on_gpu: bool,
) -> "Iterator[ReplicaSource]":
    with contextlib.ExitStack() as stack:
        if nodes is None and not args.nodes:
            from bench.pipeline.local_ranks import LocalRanks

            yield stack.enter_context(contextlib.closing(LocalRanks(folder, settings)))
            return
        from bench.pipeline.ray_nodes import Nodes, RayNodes

        if nodes is None:
            nodes = stack.enter_context(contextlib.closing(Nodes.started(args.nodes, layouts, on_gpu)))
        else:
            nodes.write(args.model, folder)
        source = stack.enter_context(contextlib.closing(RayNodes(nodes, folder, settings, on_gpu)))
        source.check(layouts)
        yield source


# ---------------------------------------------------------------- simulated machines


def plan(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Runs `--plan`. The only setting of a replica that matters here is `max_running`."""
    machines = PLANS[args.plan]
    max_running = settings.get("max_running", PLANNED_RUNNING)
    devices = machines.nodes * machines.per_node
    layouts = args.layouts or [ParallelLayout(machines.per_node, machines.nodes), ParallelLayout(devices, 1)]
    rows = PaddedSizes.of_graphs(max_running, PLANNED_BUDGET)
    traffics, jobs = _loads(args)
    for layout in layouts:
        machines.hardware(layout, rows)
        if (held := machines.kv_tokens(layout)) < MAX_CONTEXT_TOKENS // args.shrink:
            raise ValueError(
                f"{layout}: besides the weights of {args.plan}, {layout.devices} devices have room for {held} tokens, "
                f"and a request has up to {MAX_CONTEXT_TOKENS // args.shrink}: name --layouts of more devices"
            )
    validated = validations(args.out)
    prefix = f"simulated.{args.plan}"
    sweep = _sweep(args, prefix, _described(args, plan=args.plan, max_running=max_running))
    site = SimulatedSite(
        lambda layout: machines.hardware(layout, rows),
        machines.kv_tokens,
        max_running,
        rows,
        traces=args.traces / sweep.name,
    )
    study = _study(args, sweep, site, PLANNED_BUDGET, max_running)
    survey = ExperimentGrid(study, layouts, args.schedules, traffics, jobs, args.objectives, 0.0, args.delay)
    survey.run()
    sweep.raw["validation"] = validated
    for name, said in validated.items():
        off = max(map(abs, said["errors"].values()))
        say(f"{name}: what was measured is at most {off:.0%} from what the simulator says, with {said['costs']}")
    return _conclude(args, sweep, survey, Findings(study, layouts[0], survey.whole, prefix, prefix))


def validations(folder: Path) -> dict[str, Any]:
    """The errors of the simulator against measured results, by name:

    - results that were simulated with the costs learned on the machines themselves;
    - a plan of machines that were measured as well. Its rates are estimates, as in all plans.
    """
    found = results.read(folder)
    told = {name: result["simulator"] for name, result in found.items() if result.get("simulator")}
    validated = {name: {"costs": "the costs that were learned there", **said} for name, said in told.items()}
    planned, measured = (_throughputs(found.get(name, {}), name) for name in PLANNED_AND_MEASURED)
    if off := errors(measured, planned):
        said = {"costs": f"the rates of {PLANNED_AND_MEASURED[0]}", "measured": measured, "planned": planned}
        validated[PLANNED_AND_MEASURED[1] + " as planned"] = {**said, "errors": off}
    return validated


def _throughputs(result: dict[str, Any], prefix: str) -> dict[str, float]:
    """Throughputs of jobs, in tokens per second, by the rest of their figures' names after `prefix`."""
    figures = ((figure["name"].removeprefix(f"{prefix}."), figure) for figure in result.get("figures", ()))
    return {name: figure["value"] for name, figure in figures if figure["unit"] == "tokens/s"}


if __name__ == "__main__":
    sys.exit(main())
