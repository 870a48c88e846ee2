"""Pipelines of several stages: what their stages wait for, and what load they carry, by layout and by schedule.

    shoal bench pipeline --model llama-70b --layouts pp4,tp4,tp2pp2 --link sockets --name pipeline.sockets
    shoal bench pipeline --model llama-70b --layouts pp4,tp4 --traffic '' --max-running 1024 --jobs mini_1024
    shoal bench pipeline --device cpu --layouts pp2,tp2 --shrink 64 --requests 40 --jobs mini_half
    shoal bench pipeline --device cpu --layouts pp2 --nodes 2 --shrink 64 --requests 20
    shoal bench pipeline --plan falcon-180b --objectives strict,relaxed

Random weights, greedy, every output to its full length. Requests arrive as a Poisson process with the lengths of
Sarathi-Serve's two workloads (chat and long), or as in a trace; those of --jobs are there all at once, and run by the
schedule `offline`. Capacity is the highest rate at which the 99th percentile of the time between tokens stays within 5
(strict) or 25 (relaxed) times one decode iteration of the first layout, and half of the requests are scheduled within
2 seconds; it is found by bisection, from where the simulator, with the costs that were measured, says that it is.
Other schedules and layouts are searched down to an eighth of it. Where even the highest rate that was to be tried is
carried (>=), no figure is made of it: more --requests find it out.

Every load is written to the result file as soon as it has been measured: a run that is interrupted goes on where it
was when the same command is given again. A file of loads that were made otherwise is left alone: --name makes another,
--fresh replaces it. Time lines of the stages, as pictures and for https://ui.perfetto.dev, go to the folder of
--traces. With --plan nothing is measured: machines that are not there are simulated, with the scheduler that runs on
real ones.
"""

import argparse
import hashlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import link, results, shapes
from bench.jobs import HIGHEST_ID
from bench.options import count, positive
from bench.pipelines.findings import Findings, Twin
from bench.pipelines.layout import SCHEDULES, Layout, Setting
from bench.pipelines.metered import draw_kept
from bench.pipelines.simulated import PLANS, Simulated
from bench.pipelines.study import OBJECTIVES, OURS, SIMULATED, Site, Study
from bench.pipelines.survey import LEAST, Survey, print_rows
from bench.pipelines.sweep import Sweep, say
from bench.pipelines.traffic import OFFLINE, PUBLISHED, Traffic, offline, published, traced
from bench.results import number
from bench.targets import print_table
from bench.workload import Vocabulary
from pipeline.roofline import Link
from pipeline.rows import Rows
from pipeline.shape import FEATURES
from pipeline.simulate import errors
from shoal import flags
from worker.config import WorkerConfig

if TYPE_CHECKING:
    from bench.pipelines.measured import Targets

LINKS = ("nvlink", "sockets")
# Options for machines that are there alone, and their defaults.
MEASURED = {"model": "tiny", "link": "nvlink", "nodes": 0}
PLANNED_AND_MEASURED = "simulated.llama-70b", "pipeline.sockets"  # results on the same machines
CHUNK_BUDGETS = [256, 512, 1024, 2048]
VARIED = {"tp", "pp", "schedule", "tbt_slo", "load_format"}
PLANNED_BUDGET, PLANNED_RUNNING = 8192, 256
LEARNED = 32  # requests from which the costs of steps are learned, at most
AIMED = "llama-70b", 4  # the model, and on how many devices, of the figures that are aimed at
LONGEST = max(workload.most for workload in PUBLISHED.values())


def parser() -> argparse.ArgumentParser:
    """The command line; every setting of a replica that is not varied is a flag."""
    p = argparse.ArgumentParser(
        prog="shoal bench pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = p.add_argument_group("what is measured")
    what.add_argument("--plan", choices=sorted(PLANS), help="simulate these machines instead")
    what.add_argument("--model", choices=sorted(shapes.SHAPES), help="shape (default: tiny)")
    what.add_argument("--layouts", type=_some(Layout.parse), metavar="A,B", help="tp4,pp4,tp2pp2 (default: pp2)")
    what.add_argument(
        "--schedules", type=_among(SCHEDULES), default=",".join(SCHEDULES), metavar="A,B", help="default: all"
    )
    what.add_argument("--traffic", type=_among(PUBLISHED), default="long", metavar="A,B", help="chat, long (default)")
    what.add_argument("--trace", type=Path, metavar="FILE", help="lengths and arrivals of a trace, beside those")
    what.add_argument(
        "--jobs", type=_among(OFFLINE), default="", metavar="A,B", help=f"all at once: {', '.join(OFFLINE)}"
    )
    what.add_argument("--objectives", type=_among(OBJECTIVES), default="strict", metavar="A,B", help="strict, relaxed")
    what.add_argument("--requests", type=count, default=128, metavar="N", help="of a load, at most (default: 128)")
    what.add_argument(
        "--seconds", type=positive, default=120.0, metavar="S", help="in which they arrive (default: 120)"
    )
    what.add_argument("--shrink", type=count, default=1, metavar="N", help="divide all lengths by N (default: 1)")
    what.add_argument("--chunk-budgets", type=_some(count), default=CHUNK_BUDGETS, metavar="N,M", help="of fixed_chunk")
    what.add_argument("--precision", type=positive, default=0.05, metavar="X", help="of a capacity (default: 0.05)")
    what.add_argument("--seed", type=int, default=0, help="of lengths and arrivals (default: 0)")
    where = p.add_argument_group("where")
    where.add_argument("--link", choices=LINKS, help="what NCCL may use (default: nvlink)")
    where.add_argument("--nodes", type=_none_or_count, metavar="N", help="through Ray, on N nodes of this machine")
    out = p.add_argument_group("what comes of it")
    out.add_argument("--name", help="of the result (default: as its figures' names begin)")
    out.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="default: bench/results")
    out.add_argument("--traces", type=Path, default=Path("shoal-bench"), metavar="DIR", help="default: %(default)s")
    out.add_argument("--fresh", action="store_true", help="measure again what is there already")
    flags.add(p, WorkerConfig, without=VARIED)
    return p


def _list(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Each once: what is named twice would have every figure twice."""

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
            raise ValueError(f"{text!r} is none of {', '.join(names)}")
        return text

    return _list(one)


def main(argv: list[str] | None = None) -> int:
    """Measures or plans, prints tables, writes the result file. Returns the exit code: 1 if something failed."""
    args = parser().parse_args(argv)
    try:
        settings = flags.given(args, WorkerConfig)
        _complete(args, settings)
        return plan(args, settings) if args.plan else measure(args, settings)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"bench.pipeline: {error}", file=sys.stderr)
        return 1


def _complete(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Fills in the defaults of MEASURED. Raises ValueError for what was given and does nothing beside --plan."""
    given = [name for name in MEASURED if getattr(args, name) is not None]
    if args.plan and (idle := [*given, *sorted(settings.keys() - {"max_running"})]):
        flag = f"--{idle[0].replace('_', '-')}"
        raise ValueError(
            f"{flag} does nothing with --plan, whose machines, models and replicas are given: leave it out"
        )
    for name in MEASURED.keys() - given:
        setattr(args, name, MEASURED[name])


def _described(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What points depend on and their keys do not say."""
    same = ("requests", "seconds", "shrink", "seed")
    if args.trace:
        more["trace"] = hashlib.sha256(args.trace.read_bytes()).hexdigest()
    return {name: getattr(args, name) for name in same} | more


def _loads(args: argparse.Namespace) -> tuple[list[Traffic], list[Traffic]]:
    """What arrives on its own, and the jobs. Raises ValueError where there is nothing, or a trace cannot be used."""
    traffics = [published(name, args.requests, args.seed, args.shrink) for name in args.traffic]
    if args.trace:
        traffics.append(traced(args.trace, args.requests, args.seed, args.shrink, LONGEST // args.shrink))
    jobs = [offline(name, args.shrink) for name in args.jobs]
    if not traffics and not jobs:
        raise ValueError("there is nothing to offer: name some --traffic, a --trace or --jobs")
    return traffics, jobs


def _sweep(args: argparse.Namespace, name: str, about: dict[str, Any]) -> Sweep:
    """That of `--name`, or else of `name`. Raises ValueError where nothing can be written."""
    _make(args.out, "--out")
    sweep = Sweep(args.name or name, args.out, about, args.fresh)
    _make(args.traces / sweep.name, "--traces")
    return sweep


def _make(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"nothing can be written there: {error}; name another folder with {option}") from error


def _study(args: argparse.Namespace, sweep: Sweep, site: Site, budget: int, most_running: int) -> Study:
    made = Study(sweep, site, budget, args.chunk_budgets, most_running, args.shrink, args.precision, args.seconds)
    return replace(made, progress=SIMULATED) if args.plan else made


def _conclude(args: argparse.Namespace, sweep: Sweep, survey: Survey, findings: Findings) -> int:
    """Writes, prints and draws what was found."""
    survey.report(findings)
    sweep.figures = findings.figures
    sweep.raw |= {"capacities": survey.rows(), "missed": findings.reasons, "bounds": findings.bounds}
    path = sweep.write()
    print_rows(survey.rows())
    print_table(findings.figures, path, findings.reasons)
    for figure, why in findings.bounds.items():
        print(f"{figure} is a bound, {why}")
    picture = args.traces / sweep.name / "stages.png"
    if draw_kept(picture.parent, survey.time_lines(), picture, sweep.name):
        print(f"time lines of the stages: {picture}, and beside it traces for https://ui.perfetto.dev")
    return 0


# ---------------------------------------------------------------- machines that are there


def measure(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """The benchmark itself."""
    from bench.pipelines.measured import Measured
    from worker.costs import rows_of
    from worker.runner import place, settled

    layouts = args.layouts or [Layout(1, 2)]
    settings = {"load_format": "dummy", "context_length": max(1024, LONGEST // args.shrink)} | settings
    configs = [settled(WorkerConfig(**settings, tp=layout.tp, pp=layout.pp)) for layout in layouts]
    config = configs[0]
    device, dtype = place(config)
    on_gpu = device.type == "cuda"
    traffics, jobs = _loads(args)
    if on_gpu and args.link == "sockets":
        os.environ.update(link.SOCKETS)
    prefix, base = (f"pipeline.{args.link}", "pipeline") if on_gpu else ("cpu.pipeline", "cpu.pipeline")
    if on_gpu and (args.model, layouts[0].devices) != AIMED:
        prefix += f".{args.model}.{layouts[0]}"
    where = {"link": args.link if on_gpu else "gloo", "nodes": args.nodes}
    about = _described(args, model=args.model, replica=settings, features=FEATURES, **where)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        folder = shapes.write(args.model, Path(scratch) / args.model)
        _check(folder, configs, on_gpu)
        sweep = _sweep(args, prefix, about)
        speed = sweep.point("link", lambda: asdict(link.measure(device.type)))
        say(f"link: {number(speed['bytes_per_s'] / 1e9)} GB/s, {number(speed['latency_s'] * 1e6)} us")
        targets = _targets(args, folder, settings, layouts, on_gpu)
        try:
            site = Measured(targets, Vocabulary(args.seed, 0, HIGHEST_ID), args.traces / sweep.name, on_gpu)
            study = _study(args, sweep, site, config.token_budget, config.max_running)
            known = published("long", min(args.requests, LEARNED), args.seed + 1, args.shrink).at_once()
            ours = Setting(OURS, config.token_budget)
            learned = sweep.point("calibration", lambda: site.calibrate(layouts[0], ours, known))
            between = Link("measured", speed["latency_s"], speed["bytes_per_s"], 0.0, math.inf)
            token_bytes = shapes.SHAPES[args.model].config["hidden_size"] * dtype.itemsize
            twin = Twin.of(learned, between, token_bytes, config.max_running, rows_of(config, device))
            study.expected = twin.expected(study, layouts[0])
            survey = Survey(study, layouts, args.schedules, traffics, jobs, args.objectives, LEAST)
            survey.run()
            findings = Findings(study, layouts[0], survey.whole, prefix, base, twin)
            findings.link(speed)
            findings.meter(survey.floods)
            sweep.raw["simulator"] = findings.simulator(survey.floods)
            return _conclude(args, sweep, survey, findings)
        finally:
            targets.close()


def _check(folder: Path, configs: list[WorkerConfig], on_gpu: bool) -> None:
    """Raises ValueError for ranks that the model in `folder` has no layers or heads for, or this machine no GPUs."""
    import torch

    from worker.models.config import decoder_config, read_config
    from worker.models.shard import Shard

    whole = decoder_config(read_config(folder))
    for config in configs:
        Shard(whole, size=config.tp, stages=config.pp, cut=config.cut)
        if on_gpu and (gpus := torch.cuda.device_count()) < config.num_ranks:
            raise ValueError(f"tp={config.tp}, pp={config.pp}, but this machine has {gpus} GPUs: name other --layouts")


def _targets(
    args: argparse.Namespace, folder: Path, settings: dict[str, Any], layouts: list[Layout], on_gpu: bool
) -> "Targets":
    if args.nodes:
        from bench.pipelines.nodes import Nodes

        return Nodes(folder, settings, args.nodes, layouts, on_gpu)
    from bench.pipelines.ranks import Ranks

    return Ranks(folder, settings)


# ---------------------------------------------------------------- machines that are not there


def plan(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """The report of `--plan`. Of the settings of a replica, `max_running` alone matters here."""
    machines = PLANS[args.plan]
    max_running = settings.get("max_running", PLANNED_RUNNING)
    devices = machines.nodes * machines.per_node
    layouts = args.layouts or [Layout(machines.per_node, machines.nodes), Layout(devices, 1)]
    rows = Rows.of_graphs(max_running, PLANNED_BUDGET)
    traffics, jobs = _loads(args)
    for layout in layouts:
        machines.hardware(layout, rows)
        if (held := machines.kv_tokens(layout)) < LONGEST // args.shrink:
            raise ValueError(
                f"{layout}: beside the weights of {args.plan}, {layout.devices} devices have room for {held} tokens, "
                f"and a request has up to {LONGEST // args.shrink}: name --layouts of more devices"
            )
    validated = validations(args.out)
    prefix = f"simulated.{args.plan}"
    sweep = _sweep(args, prefix, _described(args, plan=args.plan, max_running=max_running))
    site = Simulated(
        lambda layout: machines.hardware(layout, rows),
        machines.kv_tokens,
        max_running,
        rows,
        traces=args.traces / sweep.name,
    )
    study = _study(args, sweep, site, PLANNED_BUDGET, max_running)
    survey = Survey(study, layouts, args.schedules, traffics, jobs, args.objectives, least=0.0)
    survey.run()
    sweep.raw["validation"] = validated
    for name, said in validated.items():
        off = max(map(abs, said["errors"].values()))
        say(f"{name}: what was measured is at most {off:.0%} from what the simulator says, with {said['costs']}")
    return _conclude(args, sweep, survey, Findings(study, layouts[0], survey.whole, prefix, prefix))


def validations(folder: Path) -> dict[str, Any]:
    """What measured results say of simulations, by name: of those whose steps cost what was learned on the machines
    themselves, and of a plan of machines that were measured too, whose rates are guesses as in all plans."""
    found = results.read(folder)
    told = {name: result["simulator"] for name, result in found.items() if result.get("simulator")}
    validated = {name: {"costs": "the costs that were learned there", **said} for name, said in told.items()}
    planned, measured = (_throughputs(found.get(name, {}), name) for name in PLANNED_AND_MEASURED)
    if off := errors(measured, planned):
        said = {"costs": f"the rates of {PLANNED_AND_MEASURED[0]}", "measured": measured, "planned": planned}
        validated[PLANNED_AND_MEASURED[1] + " as planned"] = {**said, "errors": off}
    return validated


def _throughputs(result: dict[str, Any], prefix: str) -> dict[str, float]:
    """Of jobs, in tokens a second, by what follows the prefix in their figures' names."""
    figures = ((figure["name"].removeprefix(f"{prefix}."), figure) for figure in result.get("figures", ()))
    return {name: figure["value"] for name, figure in figures if figure["unit"] == "tokens/s"}


if __name__ == "__main__":
    sys.exit(main())
