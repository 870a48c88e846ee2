"""A replica without a server, and the timing of offline workloads on it."""

import gc
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.replica.offline_workloads import Job, fresh, scaled
from bench.results import Figure
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore, predicts
from worker.engine.engine import Components, Engine, load_components
from worker.executor import memory_budget
from worker.executor.executor import ForwardOutput
from worker.executor.gpu_defaults import with_gpu_defaults
from worker.executor.launch import open_executor
from worker.folders import cache_folder
from worker.messages import SamplingParams
from worker.sampling.sampler import Sampler
from worker.step import Plan

SPEAK = ("kernels", "worker")  # packages whose log messages are shown


@contextmanager
def speaking() -> Iterator[None]:
    """Shows the log messages of the packages SPEAK meanwhile, as ranks in other processes do."""
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
    """An engine that is closed at the end. The GPU memory of an earlier engine of this process is freed before. Chosen
    matrix products are kept for the next start, as in the cluster."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with speaking():
        opened = partial(open_executor, gemm_folder=cache_folder() / "gemm")
        engine = Engine(folder, config, load=partial(load_components, make_executor=opened))
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def again(
    folder: Path, config: WorkerConfig, parts: Components, store: type[CostStore] = CostStore
) -> Iterator[Engine]:
    """Another engine on a model that is already loaded, with a new scheduler and an empty cache. The cache uses only
    the first pages of the executor's KV cache, enough for `kv_tokens` tokens.

    No other engine may run on these parts meanwhile, and another engine's cache is lost. At the end, the engine's
    integrity is checked, for example for lost pages. `store`: the class of its cost models.
    """
    config = with_gpu_defaults(config, folder)
    assert config.kv_tokens is not None
    executor = parts.executor
    whole = executor.layout, executor.context_length
    first, *others = whole[0].groups
    first = replace(first, num_units=memory_budget.num_pages(config.kv_tokens, executor.page_size))
    executor.layout = replace(whole[0], groups=(first, *others))
    executor.context_length = min(executor.context_length, config.context_length or executor.context_length)
    sampler = Sampler(config.max_running, executor.vocab_size, executor.device, executor.last_tokens)
    costs = store.load(folder, config, executor.device) if predicts(config) else store()
    try:
        engine = Engine(folder, config, load=lambda *_: parts._replace(sampler=sampler, costs=costs, lengths=None))
        yield engine
        while engine.has_work:  # a step may be in flight
            engine.step()
        engine.check_integrity()
    finally:
        executor.layout, executor.context_length = whole


def age_s() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


@dataclass(frozen=True)
class Round:
    """The result of a `generate` call for a whole job."""

    seconds: float
    cached_tokens: int
    outputs: list[list[int]] = field(default_factory=list)


@dataclass
class TimedJob:
    """Measurements of a workload. `one_token` has rounds of the same prompts with one output token, if the workload
    measures decode alone; it is empty otherwise."""

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
        """The figure of a workload of this kind. `name` is the prefix of the figure's name."""
        if kind == "bs1":
            return Figure(f"{name}.decode_tok_s", self.decode_tok_s, "tokens/s", True)
        if kind == "prefill":
            return Figure(f"{name}.input_tok_s", self.input_tokens / self.seconds, "tokens/s", True)
        if kind.startswith("sharedprefix"):
            return Figure(f"{name}.seconds", self.seconds, "s", False)
        return Figure(f"{name}.output_tok_s", self.output_tokens / self.seconds, "tokens/s", True)

    def raw(self) -> dict[str, Any]:
        """All measurements, for the result file."""
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
    """Greedy sampling to the full length of each output."""
    return [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in job[1]]


def generate(engine: Engine, job: Job) -> Round:
    """Runs the job from an empty cache, greedily, every output to its full length. Raises RuntimeError if a request
    failed or an output has another length."""
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
    """Runs small and large batches of prefill and decode, so that everything that is compiled or chosen at its first
    use is ready."""
    generate(engine, ([fresh(64, 0)], [16]))
    many = scaled(256, scale)
    generate(engine, ([fresh(128, 1000 + i) for i in range(many)], [8 + i % 32 for i in range(many)]))
    long = scaled(8, scale)
    generate(engine, ([fresh(4096, 2000 + i) for i in range(long)], [1] * long))


def measure(engine: Engine, kind: str, job: Job, warm_rounds: int, rounds: int) -> TimedJob:
    """Runs a workload `warm_rounds` times without counting, then `rounds` times. For `bs1`, every round is followed by
    one of the same prompt with one output token."""
    timed = TimedJob(job)
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
    """Measurements of a workload in a KV cache that holds only a few of its sequences.

    | field | meaning |
    | --- | --- |
    | `timed` | the round in the small cache |
    | `whole` | the round with all pages of the engine |
    | `same` | the share of outputs in the small cache that equal those with all pages |
    | `recomputed` | the share of computed tokens that had been computed before |
    """

    timed: TimedJob
    whole: Round
    same: float
    recomputed: float


def press(engine: Engine, folder: Path, config: WorkerConfig, job: Job) -> Pressed:
    """Runs the job with all pages of the engine, then with the pages of `config` on the same model."""
    whole = generate(engine, job)
    engine.reset_cache()
    computed = 0
    parts = Components(engine.executor, engine.sampler, engine.grammars, engine.costs)
    with again(folder, config, parts) as pressed:
        forward = engine.executor.forward

        def counted(plan: Plan) -> ForwardOutput:
            nonlocal computed
            computed += plan.num_tokens
            return forward(plan)

        engine.executor.forward = counted  # type: ignore[method-assign]
        try:
            timed = measure(pressed, "pressure", job, 0, 1)
        finally:
            engine.executor.forward = forward  # type: ignore[method-assign]
    same = sum(map(list.__eq__, timed.rounds[0].outputs, whole.outputs)) / len(whole.outputs)
    # Without preemption, all tokens of a sequence are computed once, except the last one and cached ones.
    once = timed.input_tokens + timed.output_tokens - len(job[0]) - timed.rounds[0].cached_tokens
    return Pressed(timed, whole, same, 1 - once / computed)
