"""One replica at the speed of its GPUs: the offline workloads on a model of a given shape, beside what is to be shown.

    shoal bench gpu --model llama-8b --workloads mini,bs1,prefill,sharedprefix,sharedprefix_interleaved
    shoal bench gpu --model llama-70b --tp 4 --scale 0.5 --workloads mini,prefill
    shoal bench gpu --model llama-70b --pp 4 --link sockets --scale 2 --workloads mini --max-running 512
    shoal bench gpu --model llama-8b --workloads mini --http --profile 64,256
    shoal bench gpu --model tiny --device cpu --scale 0.02 --workloads mini,bs1

Random weights, greedy, every output to its full length, prompts as token ids, an empty cache before every round; the
settings are the same for all workloads of a run, and the schedule is `offline`: all requests are there at once. A
figure is the median of the rounds. The result file is written anew after every workload: what was measured before an
interruption is kept. `--link` measures what passes between two GPUs before the replica starts; with `sockets`, which
stand for Ethernet between nodes, nothing else joins them.
"""

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import link, results, shapes
from bench.child import ServerFailed
from bench.jobs import JOBS, fresh
from bench.results import Figure
from bench.targets import print_table
from shoal import flags
from worker.config import WorkerConfig

if TYPE_CHECKING:  # imports torch: only where there is something to measure
    from worker.engine import Engine

DEFAULT_JOBS = "mini,bs1,prefill,sharedprefix,sharedprefix_interleaved"
CONTEXT_LENGTH = 8192
SCHEDULE = "offline"  # unless another is asked for, which is then in the figures' names
PRESSED_TOKENS = 20_000  # that the KV cache holds under `pressure`; of few sequences, half of what they need
STEPS = 100
TOP_KERNELS = 15
FIRST_TOKEN_ROUNDS = 9


@dataclass
class Report:
    """What was found so far, and where it is kept."""

    name: str
    out: Path
    settings: dict[str, Any]
    figures: list[Figure] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None

    def add(self, key: str, raw: Any, *figures: Figure) -> None:
        """Writes the result file."""
        self.figures += figures
        self.raw[key] = raw
        self.path = results.write(self.name, self.figures, {"settings": self.settings, **self.raw}, folder=self.out)


def parser() -> argparse.ArgumentParser:
    """The command line; every setting of a replica is a flag."""
    p = argparse.ArgumentParser(
        prog="shoal bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", choices=sorted(shapes.SHAPES), default="llama-8b", help="shape (default: %(default)s)")
    p.add_argument("--workloads", type=_jobs, default=DEFAULT_JOBS, metavar="A,B", help="default: %(default)s")
    p.add_argument("--scale", type=float, default=1.0, help="part of the prompts, all at their full length (default 1)")
    p.add_argument("--rounds", type=int, default=2, help="of each workload, that count (default 2)")
    p.add_argument("--warm-rounds", type=int, default=1, help="of each workload before those (default 1)")
    p.add_argument("--profile", type=_sizes, default=[], metavar="N,M", help="trace decoding at these batch sizes")
    p.add_argument(
        "--first-token", type=_sizes, default=[], metavar="N,M", help="time it after prompts of such lengths"
    )
    p.add_argument("--http", action="store_true", help="mini through `shoal serve` too")
    p.add_argument("--routers", type=int, metavar="N", help="HTTP processes of that server (default: the server's own)")
    p.add_argument("--link", choices=("nvlink", "sockets"), help="what joins the ranks, which is measured (GPUs)")
    p.add_argument("--name", help="of the result (default: gpu.MODEL, and how it is run)")
    p.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="default: bench/results")
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
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers: use 64,256") from None


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    if args.http and "mini" not in args.workloads:
        parser().error("--http compares mini through HTTP with mini: name it in --workloads")
    settings = {"load_format": "dummy", "context_length": CONTEXT_LENGTH, "schedule": SCHEDULE}
    settings |= flags.given(args, WorkerConfig)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        folder = shapes.write(args.model, Path(scratch) / args.model)
        bench = Bench(args, folder, settings)
        try:
            bench.run()
        except (RuntimeError, ValueError) as error:
            bench.failed("offline", error)
    print_table(bench.report.figures, bench.report.path)
    return 1 if bench.failures else 0


def suffix(scale: float) -> str:
    """What a scale adds to a workload's name."""
    return {1.0: "", 0.5: "_half", 2.0: "_double"}.get(scale, f"_x{scale:g}")


class Bench:
    """One run: a model in `folder`, `settings` of its replica, and the report that fills."""

    def __init__(self, args: argparse.Namespace, folder: Path, settings: dict[str, Any]) -> None:
        self.args, self.folder, self.settings = args, folder, settings
        self.config = WorkerConfig.model_validate(settings)
        self.kind = "cpu" if self.config.device == "cpu" else "gpu"
        self.model = ".".join((self.kind, shapes.SHAPES[args.model].label, *self._how()))
        self.report = Report(args.name or f"{self.model}{suffix(args.scale)}", args.out, settings)
        self.failures = 0

    def _how(self) -> list[str]:
        """What is said of the ranks in a figure's name, and of the precision."""
        sizes = (("tp", self.config.tp), ("pp", self.config.pp))
        ranks = "".join(f"{way}{size}" for way, size in sizes if size > 1)
        schedule = self.config.schedule_name
        chosen = None if schedule == SCHEDULE else schedule, self.config.quantization
        return [part for part in (ranks, self.args.link, *chosen) if part]

    def failed(self, what: str, error: Exception) -> None:
        """What was measured stays."""
        self.failures += 1
        print(f"bench.gpu: {what}: {error}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """Raises RuntimeError or ValueError where the engine cannot go on; without a server it can."""
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
        """Its speed; from now on every process of this one has no other."""
        if self.args.link == "sockets":
            os.environ.update(link.SOCKETS)
        speed = link.measure("cpu" if self.kind == "cpu" else "cuda")
        self.report.add("link", asdict(speed))
        said = f"{speed.bytes_per_s / 1e9:.2f} GB/s and {speed.latency_s * 1e6:.0f} us"
        print(f"between two ranks: {said}", flush=True)

    def _name(self, job: str) -> str:
        """What a workload's figures begin with."""
        return f"{self.model}.{job}{suffix(self.args.scale)}"

    def _serve(self) -> dict[str, Any]:
        from bench import over_http

        args = self.args
        print("mini through shoal serve", flush=True)
        settings = self.settings | {"replicas": 1}
        if args.routers is not None:
            settings["routers"] = args.routers
        measured = over_http.measure(self.folder, settings, JOBS["mini"](args.scale), args.warm_rounds, args.rounds)
        print(f"  {'mini over HTTP':26s} {over_http.line(measured)}", flush=True)
        return measured | {"routers": args.routers}

    def _offline(self) -> None:
        """All that one engine can show with the settings as they are."""
        from bench import replica

        # From the start of this process, unless it has had a server to measure first.
        start = replica.age_s() if self.args.http else 0.0
        with replica.started(self.folder, self.config) as engine:
            loaded = replica.age_s() - start
            replica.generate(engine, ([[1, 2, 3, 4]], [1]))
            first = replica.age_s() - start
            kv_tokens = engine.runner.num_pages * engine.runner.page_size
            figure = Figure(f"{self.model}.start_to_first_token.seconds", first, "s", False)
            self.report.add("start", {"engine_s": loaded, "kv_tokens": kv_tokens}, figure)
            print(f"first token after {first:.1f} s; the KV cache holds {kv_tokens:,} tokens", flush=True)
            replica.warm_up(engine, self.args.scale)
            for job in self.args.workloads:
                self._pressure(engine) if job == "pressure" else self._time(engine, job)
            for length in self.args.first_token:
                self._first_token(engine, length)
            for batch in self.args.profile:
                for grammar in (False, True):
                    self._decode(engine, batch, grammar)

    def _time(self, engine: "Engine", job: str) -> None:
        from bench import replica

        args = self.args
        timed = replica.measure(engine, job, JOBS[job](args.scale), args.warm_rounds, args.rounds)
        self.report.add(job, timed.raw(), timed.figure(job, self._name(job)))

    def _pressure(self, engine: "Engine") -> None:
        """In a KV cache that holds a few of the sequences, beside one that holds all."""
        from bench import replica

        job = JOBS["pressure"](self.args.scale)
        longest = max(map(len, job[0])) + max(job[1])
        kv_tokens = max(2 * longest, min(PRESSED_TOKENS, len(job[0]) * longest // 2))
        config = self.config.model_copy(update={"kv_tokens": kv_tokens, "context_length": longest})
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

    def _first_token(self, engine: "Engine", length: int) -> None:
        """Of a prompt that is alone."""
        from bench import replica

        seconds = [
            replica.generate(engine, ([fresh(length, number)], [1])).seconds for number in range(FIRST_TOKEN_ROUNDS)
        ]
        middle = statistics.median(seconds)
        print(f"  first token of {length:<11,d} {1e3 * middle:9.2f} ms", flush=True)
        figure = Figure(f"{self.model}.first_token.t{length}.seconds", middle, "s", False)
        self.report.add(f"first_token.t{length}", {"seconds": [round(each, 6) for each in seconds]}, figure)

    def _decode(self, engine: "Engine", batch: int, grammar: bool) -> None:
        from bench.decoding import observe

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
