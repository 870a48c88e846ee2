"""A replica in the middle of decoding: what a step takes, and what GPU and host do meanwhile."""

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench import timeline
from bench.jobs import fresh
from bench.timeline import Timeline

if TYPE_CHECKING:
    from worker.engine import Engine
    from worker.messages import Grammar

PROMPT_TOKENS = 512
SETTLE_STEPS = 16
STEPS_TO_BEGIN = 4  # that the prefill of one sequence may take, on average
PATIENCE_STEPS = 48  # in which another begins
# Random weights never close the string: every row stays in the grammar, with nearly the whole vocabulary allowed.
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
    """`step_s`: wall time of a step without the profiler. `traced_step_s`: with it. `timeline` is None without a GPU;
    what it holds is of `steps` steps."""

    batch: int
    grammar: bool
    steps: int
    step_s: float
    traced_step_s: float
    timeline: Timeline | None

    @property
    def host_step_s(self) -> float | None:
        """Wall time of a step that the host does not spend waiting for the GPU, as traced."""
        return None if self.timeline is None else (self.timeline.window_s - self.timeline.waited_s) / self.steps


def observe(engine: "Engine", batch: int, steps: int, grammar: bool) -> Decoding:
    """Decodes `batch` sequences at once for `steps` steps, then for as many under the profiler; with a grammar on
    every one of them, if asked for. Leaves nothing running.

    Raises ValueError if the engine does not run so many at once, or not for so long.
    """
    names = [f"decoding-{i}" for i in range(batch)]
    engine.reset_cache()
    try:
        # The first decodes while the last is still prefilled.
        most = 2 * steps + 2 * SETTLE_STEPS + STEPS_TO_BEGIN * batch + 1
        _begin(engine, names, most, _schema() if grammar else None)
        _run(engine, SETTLE_STEPS)
        plain = _run(engine, steps)
        traced = 0.0

        def work() -> None:
            nonlocal traced
            traced = _run(engine, steps)

        events = timeline.record(work)
        if (running := engine.load().running) != batch:
            raise ValueError(f"{batch - running} of {batch} sequences ended too early")
    finally:
        engine.abort(names)
    return Decoding(batch, grammar, steps, plain / steps, traced / steps, timeline.read(events))


def _begin(engine: "Engine", names: list[str], max_tokens: int, grammar: "Grammar | None") -> None:
    """Adds the requests, and goes on until each of them decodes."""
    from worker.messages import Generate, SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, grammar=grammar)
    for i, name in enumerate(names):
        engine.add(Generate(request_id=name, prompt_ids=fresh(PROMPT_TOKENS, i), sampling=sampling))
    begun: set[str] = set()
    steps = 0
    while len(begun) < len(names):
        if not engine.has_work:
            time.sleep(0.001)  # the grammar compiles
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
    """Seconds of so many steps, until the device has done them."""
    _synchronize(engine)
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    _synchronize(engine)
    return time.perf_counter() - start


def _synchronize(engine: "Engine") -> None:
    if engine.runner.device.type == "cuda":
        import torch

        torch.cuda.synchronize(engine.runner.device)
