"""One replica without a server, and the offline workloads timed on it."""

import gc
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.jobs import Job, fresh, scaled
from bench.results import Figure
from worker import kv_cache
from worker.config import WorkerConfig
from worker.costs import Costs, predicts
from worker.engine import Engine, Parts
from worker.messages import SamplingParams
from worker.plan import Plan
from worker.runner import settled
from worker.sampling import Sampler

SPEAK = ("kernels", "worker")  # packages whose messages are shown


@contextmanager
def speaking() -> Iterator[None]:
    """What is found and chosen meanwhile is said, as the ranks in other processes say it."""
    logging.basicConfig(format="%(message)s")
    before = {name: logging.getLogger(name).level for name in SPEAK}
    for name in SPEAK:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def started(folder: Path, config: WorkerConfig) -> Iterator[Engine]:
    """An engine, closed at the end. One that this process had before leaves it the GPU's memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with speaking():
        engine = Engine(folder, config)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def again(folder: Path, config: WorkerConfig, parts: Parts) -> Iterator[Engine]:
    """Another engine on a model that is loaded: with a scheduler that has learned nothing and a cache of its own, in
    the first `kv_tokens` of the pages that there are. Nothing else may run on these parts meanwhile, and what another
    engine had in its cache is gone. Checked at its end for anything lost."""
    config = settled(config)
    assert config.kv_tokens is not None
    runner = parts.runner
    whole = runner.num_pages, runner.context_length
    runner.num_pages = kv_cache.num_pages(config.kv_tokens, runner.page_size)
    runner.context_length = min(runner.context_length, config.context_length or runner.context_length)
    sampler = Sampler(config.max_running, runner.vocab_size, runner.device, runner.last_tokens)
    costs = Costs.of(folder, config, runner.device) if predicts(config) else Costs()
    try:
        engine = Engine(folder, config, load=lambda *_: parts._replace(sampler=sampler, costs=costs))
        yield engine
        while engine.has_work:  # a step in flight
            engine.step()
        engine.check_integrity()
    finally:
        runner.num_pages, runner.context_length = whole


def age_s() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


@dataclass(frozen=True)
class Round:
    """One `generate` of a whole job."""

    seconds: float
    cached_tokens: int
    outputs: list[list[int]] = field(default_factory=list)


@dataclass
class Timed:
    """What became of a workload. `one_token` are the rounds of the same prompts with one token of output, where the
    workload is about decoding alone."""

    job: Job
    rounds: list[Round] = field(default_factory=list)
    one_token: list[Round] = field(default_factory=list)
    preemptions: int = 0

    @property
    def seconds(self) -> float:
        return statistics.median(done.seconds for done in self.rounds)

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.job[0]))

    @property
    def output_tokens(self) -> int:
        return sum(self.job[1])

    @property
    def decode_tok_s(self) -> float:
        """Rate of the tokens after the first one."""
        first = statistics.median(done.seconds for done in self.one_token)
        return (self.job[1][0] - 1) / (self.seconds - first)

    def figure(self, kind: str, name: str) -> Figure:
        """The one figure of a workload of this name; its own begins with `name`."""
        if kind == "bs1":
            return Figure(f"{name}.decode_tok_s", self.decode_tok_s, "tokens/s", True)
        if kind == "prefill":
            return Figure(f"{name}.input_tok_s", self.input_tokens / self.seconds, "tokens/s", True)
        if kind.startswith("sharedprefix"):
            return Figure(f"{name}.seconds", self.seconds, "s", False)
        return Figure(f"{name}.output_tok_s", self.output_tokens / self.seconds, "tokens/s", True)

    def raw(self) -> dict[str, Any]:
        """All that was measured, for the result file."""
        found: dict[str, Any] = {
            "requests": len(self.job[0]),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "seconds": [round(done.seconds, 5) for done in self.rounds],
            "cached_input_tokens": [done.cached_tokens for done in self.rounds],
            "preemptions": self.preemptions,
        }
        if self.one_token:
            found["first_token_seconds"] = [round(done.seconds, 5) for done in self.one_token]
        return found


def sampling(job: Job) -> list[SamplingParams]:
    """Greedy, to the full length."""
    return [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in job[1]]


def generate(engine: Engine, job: Job) -> Round:
    """The job with an empty cache, greedily, every output to its full length. Raises RuntimeError for an output that
    failed or has another length."""
    asked = sampling(job)
    engine.reset_cache()
    start = time.perf_counter()
    finished = engine.generate(job[0], asked)
    seconds = time.perf_counter() - start
    for done, length in zip(finished, job[1], strict=True):
        if done.failure is not None:
            raise RuntimeError(f"a request failed: {done.failure.message}")
        if len(done.token_ids) != length:
            raise RuntimeError(f"{len(done.token_ids)} tokens came out where {length} were asked for")
    return Round(seconds, sum(done.cached_tokens for done in finished), [done.token_ids for done in finished])


def warm_up(engine: Engine, scale: float) -> None:
    """Large and small batches, of prefill and of decode: what is compiled or chosen at its first use is then there."""
    generate(engine, ([fresh(64, 0)], [16]))
    many = scaled(256, scale)
    generate(engine, ([fresh(128, 1000 + i) for i in range(many)], [8 + i % 32 for i in range(many)]))
    long = scaled(8, scale)
    generate(engine, ([fresh(4096, 2000 + i) for i in range(long)], [1] * long))


def measure(engine: Engine, kind: str, job: Job, warm_rounds: int, rounds: int) -> Timed:
    """`rounds` of a workload after `warm_rounds` that do not count; of `bs1`, with the same prompt and one token."""
    timed = Timed(job)
    before = engine.load().preemptions
    for number in range(-warm_rounds, rounds):
        done = generate(engine, job)
        first = generate(engine, (job[0], [1])) if kind == "bs1" else None
        print(f"  {kind:26s} {done.seconds:9.3f} s{'' if number >= 0 else '  (warm-up)'}", flush=True)
        if number >= 0:
            timed.rounds.append(done)
            timed.one_token += [first] if first is not None else []
    timed.preemptions = engine.load().preemptions - before
    return timed


@dataclass(frozen=True)
class Pressed:
    """What became of a workload in a cache that holds a few of its sequences. `same` is the part of its outputs that
    are those of a cache that holds all; `recomputed` the part of the computed tokens that had been computed before."""

    timed: Timed
    whole: Round
    same: float
    recomputed: float


def press(engine: Engine, folder: Path, config: WorkerConfig, job: Job) -> Pressed:
    """The job with all the pages that the engine has, then with those of `config` on the same parts."""
    whole = generate(engine, job)
    engine.reset_cache()
    computed = 0
    parts = Parts(engine.runner, engine.sampler, engine.grammars, engine.costs)
    with again(folder, config, parts) as pressed:
        forward = engine.runner.forward

        def counted(plan: Plan) -> torch.Tensor:
            nonlocal computed
            computed += plan.num_tokens
            return forward(plan)

        engine.runner.forward = counted  # type: ignore[method-assign]
        try:
            timed = measure(pressed, "pressure", job, 0, 1)
        finally:
            engine.runner.forward = forward  # type: ignore[method-assign]
    same = sum(map(list.__eq__, timed.rounds[0].outputs, whole.outputs)) / len(whole.outputs)
    # Of every sequence all tokens but the last, and those found in the cache, are computed once.
    once = timed.input_tokens + timed.output_tokens - len(job[0]) - timed.rounds[0].cached_tokens
    return Pressed(timed, whole, same, 1 - once / computed)
