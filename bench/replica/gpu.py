"""Speed of one replica on its GPUs: the offline workloads on a model of a given shape, compared with the targets.

    shoal bench gpu --model llama-8b --workloads mini,bs1,prefill,sharedprefix,sharedprefix_interleaved
    shoal bench gpu --model llama-70b --tp 4 --scale 0.5 --workloads mini,prefill
    shoal bench gpu --model llama-70b --pp 4 --link sockets --scale 2 --workloads mini --max-running 512
    shoal bench gpu --model llama-8b --workloads mini --http --profile 64,256
    shoal bench gpu --model tiny --device cpu --scale 0.02 --workloads mini,bs1
    shoal bench gpu --model llama-8b --acceptance 0.8,0.7,0.6

Weights are random, sampling is greedy, prompts are token ids, and every output has its full length. All requests of a
workload are added at once, with the schedule `offline` by default. The cache is emptied before every round. All
workloads of a run use the same settings.

A figure is the median of the rounds. The result file is rewritten after every workload, so an interrupted run keeps its
earlier measurements.

`--link` measures the link between two GPUs before the replica starts. With `--link sockets`, the GPUs are joined by
sockets alone, which stand for Ethernet between nodes.

`--acceptance` measures what drafts bring, without a drafter that knows the model: of each sequence's drafts, the first
is right with the first of these probabilities, the next with the second if the first was right, and so on. Whether and
how many drafts a step takes is the replica's own choice. No other workload runs then, unless `--workloads` names some.
"""

import argparse
import os
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import results
from bench.load.options import fractions, on_gpu
from bench.replica import dummy_models, link_speed
from bench.replica.offline_workloads import JOBS, fresh
from bench.replica.server_process import ServerFailed
from bench.results import Figure
from bench.targets import print_table
from shoal import flags
from shoal.help import Parser
from worker.config import WorkerConfig

if TYPE_CHECKING:  # imports torch, which only a measurement needs
    from worker.engine.engine import Engine

DEFAULT_JOBS = "mini,bs1,prefill,sharedprefix,sharedprefix_interleaved"
CONTEXT_LENGTH = 8192
SCHEDULE = "offline"  # the default; any other schedule is part of the figures' names
PRESSED_TOKENS = 20_000  # size of the KV cache under `pressure`, or half of what the sequences need if that is less
STEPS = 100
ROUNDS, DRAFT_ROUNDS = 2, 5
TOP_KERNELS = 15
FIRST_TOKEN_ROUNDS = 9


@dataclass
class GpuReport:
    """The measurements so far, and the result file that keeps them."""

    name: str
    out: Path
    settings: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def add(self, key: str, raw: Any, *figures: Figure) -> None:
        """Adds a measurement and rewrites the result file."""
        self.figures += figures
        self.raw[key] = raw
        self.path = results.write(self.name, self.figures, {"settings": self.settings, **self.raw}, folder=self.out)


def parser() -> Parser:
    """The command line. Every setting of a replica is a flag."""
    p = Parser("shoal bench gpu", __doc__)
    p.add_argument(
        "--model",
        choices=sorted(dummy_models.SHAPES),
        default="llama-8b",
        help="shape of the model (default: %(default)s)",
    )
    p.add_argument("--workloads", type=_jobs, metavar="A,B", help=f"default: {DEFAULT_JOBS}")
    p.add_argument("--scale", type=float, default=1.0, help="fraction of the prompts; their lengths stay (default 1)")
    p.add_argument(
        "--rounds",
        type=int,
        help=f"counted rounds of each workload (default {ROUNDS}), and of each batch of --batches (default "
        f"{DRAFT_ROUNDS})",
    )
    p.add_argument("--warm-rounds", type=int, default=1, help="uncounted rounds before them (default 1)")
    p.add_argument("--profile", type=_sizes, default=[], metavar="N,M", help="profile decode at these batch sizes")
    p.add_argument(
        "--first-token",
        type=_sizes,
        default=[],
        metavar="N,M",
        help="time the first token after prompts of these lengths",
    )
    p.add_argument(
        "--acceptance", type=fractions, metavar="A,B", help="measure decoding with drafts that are right so often"
    )
    p.add_argument(
        "--batches",
        type=_sizes,
        default="1,8,32,256",
        metavar="N,M",
        help="for --acceptance: numbers of sequences that decode at once (default %(default)s)",
    )
    p.add_argument("--http", action="store_true", help="also run mini through `shoal serve`")
    p.add_argument("--routers", type=int, metavar="N", help="HTTP processes of that server (default: as `shoal serve`)")
    p.add_argument("--link", choices=("nvlink", "sockets"), help="link between the ranks, which is measured too (GPUs)")
    results.add_options(p, None, "gpu.MODEL and the layout, after drafts. with --acceptance alone")
    flags.add(p, WorkerConfig)
    return p


def _jobs(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if wrong := [name for name in names if name not in JOBS]:
        raise argparse.ArgumentTypeError(f"no workload {wrong[0]}: there are {', '.join(JOBS)}")
    return names


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are not numbers: use 64,256") from None


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    if args.workloads is None:
        args.workloads = [] if args.acceptance else _jobs(DEFAULT_JOBS)
    if args.http and "mini" not in args.workloads:
        parser().error("--http compares mini through HTTP with mini: name it in --workloads")
    settings = {"load_format": "dummy", "context_length": CONTEXT_LENGTH, "schedule": SCHEDULE}
    settings |= flags.given(args, WorkerConfig)
    if args.acceptance and not on_gpu(settings):
        settings.setdefault("max_running", max(WorkerConfig.model_validate({}).max_running, *args.batches))
    if settings.get("device") is None and not on_gpu(settings):
        parser().error("there is no GPU here: a CPU takes --device cpu --model tiny --scale 0.02")
    with dummy_models.written(args.model) as folder:
        bench = Bench(args, folder, settings)
        try:
            bench.run()
        except (RuntimeError, ValueError) as error:
            bench.failed("offline", error)
    print_table(bench.report.figures, bench.report.path)
    return 1 if bench.failures else 0


def suffix(scale: float) -> str:
    """The suffix of a workload's name for a scale."""
    return {1.0: "", 0.5: "_half", 2.0: "_double"}.get(scale, f"_x{scale:g}")


class Bench:
    """A run of the benchmark: the model in `folder`, the `settings` of its replica, and the report."""

    def __init__(self, args: argparse.Namespace, folder: Path, settings: dict[str, Any]) -> None:
        self.args, self.folder, self.settings = args, folder, settings
        self.config = WorkerConfig.model_validate(settings)
        self.kind = "cpu" if self.config.device == "cpu" else "gpu"
        self.model = ".".join((self.kind, dummy_models.SHAPES[args.model].label, *self._how()))
        name = f"{self.model}{suffix(args.scale)}" if args.workloads else f"drafts.{self.model}"
        self.report = GpuReport(args.name or name, args.out, settings)
        self.failures = 0

    def _how(self) -> list[str]:
        """Parts of a figure's name: ranks, link, schedule if it is not the default, and quantization."""
        sizes = (("tp", self.config.tp), ("pp", self.config.pp))
        ranks = "".join(f"{way}{size}" for way, size in sizes if size > 1)
        ranks += "ep" if self.config.enable_expert_parallel else ""
        schedule = self.config.schedule_name
        chosen = None if schedule == SCHEDULE else schedule, self.config.quantization
        return [part for part in (ranks, self.args.link, *chosen) if part]

    def failed(self, what: str, error: Exception) -> None:
        """Prints and counts a failure. Earlier measurements are kept."""
        self.failures += 1
        print(f"shoal bench gpu: {what}: {error}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """Measures everything. Raises RuntimeError or ValueError if the engine fails. A failure of the server is only
        counted, and the engine is still measured."""
        served = None
        if self.args.link is not None:
            self._link()
        if self.args.http:
            try:
                served = self._serve()
            except ServerFailed as error:
                self.failed("http", error)
        self._offline()
        if served is not None:
            mini = f"{self._name('mini')}.output_tok_s"
            offline = next(figure.value for figure in self.report.figures if figure.name == mini)
            ratio = Figure(f"{self.kind}.http.mini.vs_offline", served["output_tok_s"] / offline, "ratio", True)
            self.report.add("http", served, ratio)

    def _link(self) -> None:
        """Measures the link. From here on, all child processes use this link alone."""
        if self.args.link == "sockets":
            os.environ.update(link_speed.SOCKETS)
        speed = link_speed.measure("cpu" if self.kind == "cpu" else "cuda")
        self.report.add("link", asdict(speed))
        said = f"{speed.bytes_per_s / 1e9:.2f} GB/s and {speed.latency_s * 1e6:.0f} us"
        print(f"between two ranks: {said}", flush=True)

    def _name(self, job: str) -> str:
        """The prefix of the names of a workload's figures."""
        return f"{self.model}.{job}{suffix(self.args.scale)}"

    def _serve(self) -> dict[str, Any]:
        from bench.replica import over_http

        args = self.args
        print("mini through shoal serve", flush=True)
        settings = self.settings | {"replicas": 1}
        if args.routers is not None:
            settings["routers"] = args.routers
        measured = over_http.measure(
            self.folder, settings, JOBS["mini"](args.scale), args.warm_rounds, args.rounds or ROUNDS
        )
        print(f"  {'mini over HTTP':26s} {over_http.line(measured)}", flush=True)
        return measured | {"routers": args.routers}

    def _offline(self) -> None:
        """Runs all measurements that need an engine without a server."""
        from bench.replica import replica

        # Times count from the start of this process, or from here if a server was measured before.
        start = replica.age_s() if self.args.http else 0.0
        with replica.started(self.folder, self.config) as engine:
            loaded = replica.age_s() - start
            replica.generate(engine, ([[1, 2, 3, 4]], [1]))
            first = replica.age_s() - start
            kv_tokens = engine.executor.num_pages * engine.executor.page_size
            figure = Figure(f"{self.model}.start_to_first_token.seconds", first, "s", False)
            self.report.add("start", {"engine_s": loaded, "kv_tokens": kv_tokens}, figure)
            print(f"first token after {first:.1f} s; the KV cache holds {kv_tokens:,} tokens", flush=True)
            if self.args.acceptance:
                self._drafts(engine)
                engine.reset_cache()
            if self.args.workloads or self.args.first_token or self.args.profile:
                replica.warm_up(engine, self.args.scale)
            for job in self.args.workloads:
                self._pressure(engine) if job == "pressure" else self._time(engine, job)
            for length in self.args.first_token:
                self._first_token(engine, length)
            for batch in self.args.profile:
                for grammar in (False, True):
                    self._decode(engine, batch, grammar)

    def _time(self, engine: "Engine", job: str) -> None:
        from bench.replica import replica

        args = self.args
        rounds = args.rounds or ROUNDS
        timed = replica.measure(engine, job, JOBS[job](args.scale), args.warm_rounds, rounds)
        self.report.add(job, timed.raw(), timed.figure(job, self._name(job)))

    def _pressure(self, engine: "Engine") -> None:
        """Measures `pressure` in a KV cache that holds few of the sequences, compared with a cache that holds all."""
        from bench.replica import replica

        job = JOBS["pressure"](self.args.scale)
        longest = max(map(len, job[0])) + max(job[1])
        kv_tokens = max(2 * longest, min(PRESSED_TOKENS, len(job[0]) * longest // 2))
        slots = engine.scheduler.config.max_running
        pressed = {"kv_tokens": kv_tokens, "context_length": longest, "max_running": slots}
        config = self.config.model_copy(update=pressed)
        found = replica.press(engine, self.folder, config, job)
        name = self._name("pressure")
        print(f"  {found.same:.1%} of outputs as without pressure; {found.recomputed:.2%} computed again", flush=True)
        self.report.add(
            "pressure",
            found.timed.raw() | {"kv_tokens": kv_tokens, "whole_seconds": found.whole.seconds},
            found.timed.figure("pressure", name),
            Figure(f"{name}.same", found.same, "ratio", True),
            Figure(f"{name}.recomputed", found.recomputed, "ratio", False),
        )

    def _drafts(self, engine: "Engine") -> None:
        """Measures decoding with drafts."""
        from bench.replica.draft_speed import DraftSpeed

        speed = DraftSpeed(engine, self.folder, self.config, self.args.acceptance)
        name = ".".join(("drafts", self.kind, *self._how()))
        for batch in self.args.batches:
            try:
                compared = speed.compare(batch, self.args.rounds or DRAFT_ROUNDS)
            except ValueError as error:
                self.failed(f"drafts, {batch} sequences", error)
                continue
            raw = compared.raw() | {"acceptance": self.args.acceptance, "cost_error": speed.costs.models[0].error()}
            self.report.add(f"drafts.b{batch}", raw, *compared.figures(name))

    def _first_token(self, engine: "Engine", length: int) -> None:
        """Measures the time to the first token of a single prompt."""
        from bench.replica import replica

        seconds = [
            replica.generate(engine, ([fresh(length, number)], [1])).seconds for number in range(FIRST_TOKEN_ROUNDS)
        ]
        middle = statistics.median(seconds)
        print(f"  first token of {length:<11,d} {1e3 * middle:9.2f} ms", flush=True)
        figure = Figure(f"{self.model}.first_token.t{length}.seconds", middle, "s", False)
        self.report.add(f"first_token.t{length}", {"seconds": [round(each, 6) for each in seconds]}, figure)

    def _decode(self, engine: "Engine", batch: int, grammar: bool) -> None:
        from bench.replica.decode_profile import observe

        seen = observe(engine, batch, STEPS, grammar)
        name = f"{'grammar.' if grammar else ''}b{batch}"
        print(f"decoding, {name}: {seen.step_s * 1e3:.3f} ms a step, traced {seen.traced_step_s * 1e3:.3f}", flush=True)
        raw = {key: value for key, value in asdict(seen).items() if key != "timeline"}
        if (line := seen.timeline) is None or seen.host_step_s is None:
            self.report.add(f"decoding.{name}", raw)
            return
        raw |= {"host_step_s": seen.host_step_s, **asdict(line)}
        self.report.add(
            f"decoding.{name}",
            raw,
            Figure(f"{self.kind}.idle_fraction.{name}", line.idle_fraction, "ratio", False),
            Figure(f"{self.kind}.idle_between.{name}", line.idle_between_fraction, "ratio", False),
            Figure(f"{self.kind}.host_step.{name}", seen.host_step_s, "s", False),
        )
        for kernel in line.kernels[:TOP_KERNELS]:
            each, launches = kernel.busy_s / seen.steps, kernel.launches / seen.steps
            share = kernel.busy_s / line.window_s
            print(f"  {each * 1e6:9.1f} us a step {share:6.1%} {launches:7.1f} x  {kernel.name[:90]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
