"""Decode steps of a replica: their time, and the activity of GPU and host during them."""

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.replica import gpu_timeline
from bench.replica.gpu_timeline import GpuTimeline
from bench.replica.offline_workloads import fresh

if TYPE_CHECKING:
    from worker.engine.engine import Engine
    from worker.messages import Grammar

PROMPT_TOKENS = 512
SETTLE_STEPS = 16
STEPS_TO_BEGIN = 4  # steps that the prefill of a sequence may take, on average
PATIENCE_STEPS = 48  # steps within which one more sequence must begin to decode
# Random weights never close the string. So every sequence stays guided, with nearly the whole vocabulary allowed.
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True)
class Decoding:
    """Measurements of decoding `batch` sequences.

    | field | meaning |
    | --- | --- |
    | `step_s` | mean wall time of a step without the profiler |
    | `traced_step_s` | mean wall time of a step with the profiler |
    | `timeline` | GPU activity over `steps` steps; None without a GPU |
    """

    batch: int
    grammar: bool
    steps: int
    step_s: float
    traced_step_s: float
    timeline: GpuTimeline | None

    @property
    def host_step_s(self) -> float | None:
        """Mean wall time of a traced step, without the time that the host waits for the GPU. None without a GPU."""
        return None if self.timeline is None else (self.timeline.window_s - self.timeline.waited_s) / self.steps


def observe(engine: "Engine", batch: int, steps: int, grammar: bool) -> Decoding:
    """Decodes `batch` sequences at once for `steps` steps, and then for `steps` more under the profiler. With
    `grammar`, every sequence is guided by a grammar. Aborts all sequences at the end.

    Raises ValueError if the engine cannot run `batch` sequences at once, or if one of them ends too early.
    """
    names = [f"decoding-{i}" for i in range(batch)]
    engine.reset_cache()
    try:
        # The first sequence decodes while the last one is still in prefill.
        most = 2 * steps + 2 * SETTLE_STEPS + STEPS_TO_BEGIN * batch + 1
        _begin(engine, names, most, _schema() if grammar else None)
        _run(engine, SETTLE_STEPS)
        plain = _run(engine, steps)
        traced = 0.0

        def work() -> None:
            nonlocal traced
            traced = _run(engine, steps)

        events = gpu_timeline.record(work)
        if (running := engine.load().running) != batch:
            raise ValueError(f"{batch - running} of {batch} sequences ended too early")
    finally:
        engine.abort(names)
    return Decoding(batch, grammar, steps, plain / steps, traced / steps, gpu_timeline.read(events))


def _begin(engine: "Engine", names: list[str], max_tokens: int, grammar: "Grammar | None") -> None:
    """Adds the requests, and steps until all of them decode."""
    from worker.messages import Generate, SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, grammar=grammar)
    for i, name in enumerate(names):
        engine.add(Generate(request_id=name, prompt_ids=fresh(PROMPT_TOKENS, i), sampling=sampling))
    begun: set[str] = set()
    steps = 0
    while len(begun) < len(names):
        if not engine.has_work:
            time.sleep(0.001)  # while the grammar compiles
        elif (steps := steps + 1) > PATIENCE_STEPS:
            raise ValueError(f"{len(names)} sequences at once: max_running or kv_tokens allows {engine.load().running}")
        for output in engine.step():
            if output.finish_reason is not None:
                why = output.failure.message if output.failure else output.finish_reason
                raise ValueError(f"a sequence ended before {len(names)} decoded at once: {why}")
            if output.request_id not in begun:
                begun.add(output.request_id)
                steps = 0


def _schema() -> "Grammar":
    from worker.messages import Grammar

    return Grammar("json_schema", SCHEMA)


def _run(engine: "Engine", steps: int) -> float:
    """Runs `steps` steps. Returns the seconds until the device has finished them."""
    _synchronize(engine)
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    _synchronize(engine)
    return time.perf_counter() - start


def _synchronize(engine: "Engine") -> None:
    if engine.executor.device.type == "cuda":
        import torch

        torch.cuda.synchronize(engine.executor.device)
