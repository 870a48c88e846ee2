"""The speed of decoding with drafts of a given acceptance, next to decoding without, on the same model in one process.

A round runs a batch once without drafts and once with. All prompts are in the cache before a round is timed, so all
sequences begin at once. What counts is the time from the step after which all decode to the step after which the first
has all its tokens: meanwhile the batch is full.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.replica import gpu_timeline
from bench.replica.gpu_timeline import GpuTimeline
from bench.replica.offline_workloads import fresh
from bench.replica.synthetic_drafts import RecordedOutputs, ReplayingSampler, SyntheticDrafter
from bench.results import Figure
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.engine.engine import Components, Engine, frozen_heap
from worker.executor.gpu_defaults import with_gpu_defaults
from worker.messages import Generate, SamplingParams
from worker.sampling.sampler import Sampler

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
HOST_STEP_BATCH = 32  # the batch at which the host's time is compared with the device's
SETTLE_STEPS, TRACED_STEPS = 16, 40
PATIENCE_STEPS = 64  # steps within which one more sequence must begin to decode
TOP_KERNELS = 8


@dataclass(frozen=True)
class Decoded:
    """Decoding of a full batch for some time.

    | field | meaning |
    | --- | --- |
    | `tokens`, `steps` | output tokens and steps in `seconds` |
    | `drafted`, `accepted` | drafts in that time, and those of them that were right |
    | `compute_s` | the part of `seconds` in which a stage computed, all stages' mean |
    """

    batch: int
    tokens: int
    steps: int
    seconds: float
    drafted: int
    accepted: int
    compute_s: float

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.seconds

    @property
    def tokens_a_step(self) -> float:
        """Output tokens of one sequence in a step."""
        return self.tokens / self.steps / self.batch

    def line(self) -> str:
        """The figures for the terminal."""
        step_ms, compute_ms = (1e3 * seconds / self.steps for seconds in (self.seconds, self.compute_s))
        said = f"{self.tokens_a_step:.2f} tokens a step of {step_ms:.3f} ms, of which {compute_ms:.3f} computing"
        return f"{self.rate:9.0f} tokens/s, {said}"


@dataclass
class Compared:
    """The rounds of one batch, in the order in which they ran, and steps with drafts under the profiler."""

    batch: int
    off: list[Decoded] = field(default_factory=list)
    on: list[Decoded] = field(default_factory=list)
    traced: "TracedSteps | None" = None

    @property
    def vs_off(self) -> float:
        """Tokens a second with drafts over those without, the median of the rounds."""
        return statistics.median(on.rate / off.rate for off, on in zip(self.off, self.on, strict=True))

    def figures(self, name: str) -> list[Figure]:
        """The figures, their names prefixed with `name`."""
        own = f"{name}.b{self.batch}"
        steps, drafted = sum(each.steps for each in self.on), sum(each.drafted for each in self.on)
        tokens, accepted = sum(each.tokens for each in self.on), sum(each.accepted for each in self.on)
        found = [
            Figure(f"{own}.vs_off", self.vs_off, "ratio", True),
            Figure(f"{own}.output_tok_s", statistics.median(each.rate for each in self.on), "tokens/s", True),
            Figure(f"{own}.tokens_a_step", tokens / steps / self.batch, "tokens", True),
            Figure(f"{own}.drafted_a_step", drafted / steps / self.batch, "tokens", True),
            Figure(f"{own}.accepted_a_step", accepted / steps / self.batch, "tokens", True),
        ]
        if self.batch == HOST_STEP_BATCH and self.traced is not None:
            found.append(Figure(f"{name}.host_step", self.traced.host_s / self.traced.device_s, "ratio", False))
        return found

    def raw(self) -> dict[str, Any]:
        """All measurements, for the result file."""
        rounds = [{"off": asdict(off), "on": asdict(on)} for off, on in zip(self.off, self.on, strict=True)]
        return {"rounds": rounds, "traced": None if self.traced is None else asdict(self.traced)}


@dataclass(frozen=True)
class TracedSteps:
    """Steps with drafts.

    | field | meaning |
    | --- | --- |
    | `step_s` | time of a step |
    | `host_s` | the part in which the host works, and does not wait for the device |
    | `device_s` | the part in which the device works |
    | `kernels` | the longest kernels: name, launches a step, seconds a step; none on a CPU |
    """

    step_s: float
    host_s: float
    device_s: float
    kernels: list[tuple[str, float, float]] = field(default_factory=list)

    @classmethod
    def of_gpu(cls, line: GpuTimeline, steps: int) -> "TracedSteps":
        """From a GPU's timeline."""
        kernels = [
            (kernel.name[:120], kernel.launches / steps, kernel.busy_s / steps) for kernel in line.kernels[:TOP_KERNELS]
        ]
        host_s, device_s = line.window_s - line.waited_s, line.window_s - line.idle_s
        return cls(line.window_s / steps, host_s / steps, device_s / steps, kernels)

    def line(self) -> str:
        """The figures for the terminal."""
        return (
            f"a step of {1e3 * self.step_s:.3f} ms: the device works for {1e3 * self.device_s:.3f} ms, the host for "
            f"{1e3 * self.host_s:.3f} ms"
        )


class DraftSpeed:
    """Measures batches on a loaded model."""

    def __init__(self, engine: Engine, folder: Path, config: WorkerConfig, acceptance: Sequence[float]) -> None:
        """`engine`: holds the model of `folder`, and is not to run meanwhile. `config`: its settings. `acceptance`: see
        `RecordedOutputs`."""
        if config.pp == 1:
            # Prompts as fast as possible, so that a batch begins together. Steps of decodes are as with any schedule.
            config = config.model_copy(update={"schedule": "fixed_chunk", "tbt_slo": None})
        self._folder, self._config, self._acceptance = folder, with_gpu_defaults(config, folder), acceptance
        # What steps cost is learned from all rounds, with and without drafts, as in a replica that runs for long.
        costs = engine.costs if engine.costs.models else CostStore.load(folder, config, engine.executor.device)
        self._parts = Components(engine.executor, engine.sampler, engine.grammars, costs)
        self.costs = costs
        engine.reset_cache()

    def compare(self, batch: int, rounds: int) -> Compared:
        """Runs a batch in alternating rounds, after one of each kind that does not count. Raises ValueError if the
        engine cannot run that many sequences at once, and RuntimeError if a request fails."""
        prompts = [fresh(PROMPT_TOKENS, 10_000 + i) for i in range(batch)]
        with self._engine(None) as engine:
            recorded = _RunningBatch(engine, prompts)
            while recorded.num_ended < batch:
                recorded.step()
        outputs, vocab_size = list(recorded.outputs.values()), self._parts.executor.vocab_size
        compared = Compared(batch)
        for number in range(-1, rounds):
            # Other errors in every round: one sequence alone has better and worse luck.
            recording = RecordedOutputs(prompts, outputs, self._acceptance, vocab_size, seed=1 + number)
            found: dict[bool, Decoded] = {}
            for drafts in (False, True) if number % 2 else (True, False):
                with self._engine(recording if drafts else None) as engine:
                    found[drafts] = _decode(engine, prompts)
            counted = "" if number >= 0 else "  (warm-up)"
            print(f"  drafts, b{batch:<4d} off {found[False].line()}{counted}", flush=True)
            print(f"  {'':12s} on  {found[True].line()}{counted}", flush=True)
            if number >= 0:
                compared.off.append(found[False])
                compared.on.append(found[True])
        with self._engine(recording) as engine:
            compared.traced = _trace(engine, prompts)
        print(f"  {'':12s} traced: {compared.traced.line()}; x{compared.vs_off:.3f}", flush=True)
        return compared

    @contextmanager
    def _engine(self, recording: RecordedOutputs | None) -> Iterator[Engine]:
        """A new scheduler and cache on the model; with drafts if there is a recording. At the end, its integrity is
        checked."""
        executor = self._parts.executor
        sizes = self._config.max_running, executor.vocab_size, executor.device, executor.last_tokens
        if recording is None:
            parts = self._parts._replace(sampler=Sampler(*sizes))
        else:
            sampler = ReplayingSampler(recording, *sizes)
            parts = self._parts._replace(sampler=sampler, drafters=(SyntheticDrafter(recording),))
        engine = Engine(self._folder, self._config, load=lambda *_: parts)
        yield engine
        while engine.has_work:  # a step may be in flight
            engine.step()
        engine.meter()  # takes the times of all steps, which the next engine would take for its own
        engine.check_integrity()


class _RunningBatch:
    """A batch on an engine, from the step on after which all sequences decode."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]]) -> None:
        """Computes the prompts, then adds the requests and steps until all decode. Raises ValueError if not all can run
        at once, and RuntimeError if a request fails."""
        self.engine = engine
        self.outputs: dict[str, list[int]] = {f"drafts-{i}": [] for i in range(len(prompts))}
        """The output so far of each request."""
        self.num_ended = 0
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        for done in engine.generate(list(prompts), sampling):
            if done.failure is not None:
                raise RuntimeError(f"a request failed: {done.failure.message}")
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        for name, prompt in zip(self.outputs, prompts, strict=True):
            engine.add(Generate(request_id=name, prompt_ids=prompt, sampling=sampling))
        begun = idle_steps = 0
        while begun < len(prompts):
            self.step()
            now = sum(map(bool, self.outputs.values()))
            begun, idle_steps = now, 0 if now > begun else idle_steps + 1
            if self.num_ended or idle_steps > PATIENCE_STEPS:
                running = engine.load().running
                raise ValueError(f"{len(prompts)} sequences at once: max_running or kv_tokens allows {running}")

    def step(self) -> None:
        """Runs a step. Raises RuntimeError if a request fails."""
        for output in self.engine.step():
            if output.failure is not None:
                raise RuntimeError(f"a request failed: {output.failure.message}")
            self.outputs[output.request_id] += output.token_ids
            self.num_ended += output.finish_reason is not None

    def abort(self) -> None:
        """Ends the requests that are left."""
        self.engine.abort(self.outputs)


@dataclass(frozen=True)
class _Counts:
    """Counters of an engine."""

    tokens: int
    steps: int
    drafted: int
    accepted: int
    compute_s: float

    @classmethod
    def of(cls, engine: Engine) -> "_Counts":
        load = engine.load()
        computed = [spent["compute"] for spent in load.stage_seconds]
        drafted, accepted = sum(load.drafted.values()), sum(load.accepted.values())
        return cls(load.output_tokens, load.steps, drafted, accepted, statistics.fmean(computed))


def _decode(engine: Engine, prompts: Sequence[list[int]]) -> Decoded:
    """Decodes a batch until the first sequence ends."""
    batch = _RunningBatch(engine, prompts)
    with frozen_heap():
        begun_s, before = time.perf_counter(), _Counts.of(engine)
        while not batch.num_ended:
            batch.step()
        seconds, after = time.perf_counter() - begun_s, _Counts.of(engine)
    batch.abort()
    return Decoded(
        len(prompts),
        after.tokens - before.tokens,
        after.steps - before.steps,
        seconds,
        after.drafted - before.drafted,
        after.accepted - before.accepted,
        after.compute_s - before.compute_s,
    )


def _trace(engine: Engine, prompts: Sequence[list[int]]) -> TracedSteps:
    """Runs steps under the profiler."""
    batch, device = _RunningBatch(engine, prompts), engine.executor.device
    for _ in range(SETTLE_STEPS):
        batch.step()
    seconds = computed_s = 0.0

    def work() -> None:
        nonlocal seconds, computed_s
        _synchronize(device)
        begun_s, before = time.perf_counter(), _Counts.of(engine)
        for _ in range(TRACED_STEPS):
            batch.step()
        _synchronize(device)
        seconds, computed_s = time.perf_counter() - begun_s, _Counts.of(engine).compute_s - before.compute_s

    line = gpu_timeline.read(gpu_timeline.record(work))
    if batch.num_ended:
        raise ValueError(f"a sequence ended within {SETTLE_STEPS + TRACED_STEPS} steps")
    batch.abort()
    if line is not None:
        return TracedSteps.of_gpu(line, TRACED_STEPS)
    # The meter counts whole steps, so the first and the last may lie partly outside of `seconds`.
    steps, computed_s = TRACED_STEPS, min(computed_s, seconds)
    return TracedSteps(seconds / steps, (seconds - computed_s) / steps, computed_s / steps)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
