"""Host time of a step: scheduler, plan, page tables, sampler and messages of a replica whose executor computes nothing.

    shoal bench host --batches 1,64,256,512

Each batch is a number of sequences of about 300 tokens that decode at once, with overlapped scheduling. A `mixed` step
holds 8,192 tokens of prompts and 200 decodes. A figure is the median over the steps, in microseconds of this thread's
CPU time, so that other work on the machine hardly counts.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench import results
from bench.load.options import count, counts
from bench.replica.offline_workloads import fresh
from bench.results import Figure
from shoal.help import Parser

if TYPE_CHECKING:  # imports torch
    from worker.engine.engine import Engine
    from worker.messages import Output

DECODES_BESIDE, PROMPTS, PROMPT_TOKENS = 200, 8, 1024
SETTLE_STEPS = 20


def replica(max_running: int) -> "Engine":
    """An engine whose executor computes nothing."""
    from bench.replica.null_executor import PAGE_SIZE, VOCAB_SIZE, NullExecutor
    from worker.config import WorkerConfig
    from worker.engine.engine import Components, Engine
    from worker.sampling.sampler import Sampler

    def load(folder: Path, config: "WorkerConfig") -> Any:
        executor = NullExecutor(max_running, PROMPTS)
        sampler = Sampler(max_running, VOCAB_SIZE, executor.device, executor.last_tokens)
        return Components(executor, sampler, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]

    budget = PROMPTS * PROMPT_TOKENS
    settings = {"device": "cpu", "max_running": max_running, "token_budget": budget, "page_size": PAGE_SIZE}
    return Engine(Path("none"), WorkerConfig.model_validate({**settings, "overlap": True}), load=load)


class StepClock:
    """A clock for steps and their parts."""

    def __init__(self, engine: "Engine") -> None:
        self.steps: list[float] = []
        self.parts: dict[str, float] = defaultdict(float)
        self._engine = engine
        for name, owner, method in (
            ("schedule", engine.scheduler, "schedule"),
            ("tables", engine.executor, "forward"),
            ("launch sampling", engine.sampler, "launch"),
            ("update", engine.scheduler, "update"),
        ):
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def step(self) -> "list[Output]":
        """Times a step of the engine and the encoding of its outputs. Returns the outputs."""
        from worker.messages import Outputs, encode

        start = time.thread_time()
        outputs = self._engine.step()
        stepped = time.thread_time()
        encode(Outputs(outputs))
        end = time.thread_time()
        self.steps.append(end - start)
        self.parts["message"] += end - stepped
        return outputs

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return work(*arguments)
            finally:
                self.parts[name] += time.thread_time() - start

        return timed

    def read(self) -> dict[str, float]:
        """Returns microseconds of a step (median) and of each part per step (mean). Then resets the clock."""
        found = {name: seconds / len(self.steps) * 1e6 for name, seconds in self.parts.items()}
        found = {"step": median(self.steps) * 1e6, **found}
        self.steps.clear()
        self.parts.clear()
        return found


def decoding(batch: int, steps: int) -> dict[str, float]:
    """Times steps of `batch` decodes."""
    engine = replica(batch)
    _add(engine, batch, 300, 2 * SETTLE_STEPS + steps + batch)
    clock = StepClock(engine)
    while len(clock.step()) < batch:
        continue  # some prompts are still in prefill
    for _ in range(SETTLE_STEPS):
        clock.step()
    clock.read()
    for _ in range(steps):
        clock.step()
    found = clock.read()
    engine.close()
    return found


def mixed(steps: int) -> dict[str, float]:
    """Times steps of decodes together with as many prompt tokens as the budget allows."""
    engine = replica(DECODES_BESIDE + 3 * PROMPTS)  # a prompt's slot is freed one step after its last
    _add(engine, DECODES_BESIDE, 300, 2 * SETTLE_STEPS + 2 * steps + DECODES_BESIDE)
    clock = StepClock(engine)
    for _ in range(SETTLE_STEPS):
        clock.step()
    clock.read()
    for step in range(steps):
        _add(engine, PROMPTS, PROMPT_TOKENS, 1, first=DECODES_BESIDE + step * PROMPTS)
        clock.step()
    found = clock.read()
    engine.close()
    return found


def _add(engine: "Engine", count: int, prompt_tokens: int, max_tokens: int, first: int = 0) -> None:
    from worker.messages import Generate, SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for i in range(first, first + count):
        prompt = fresh(prompt_tokens + i % 16, i)
        engine.add(Generate(request_id=f"chatcmpl-{i:032x}", prompt_ids=prompt, sampling=sampling))


def parser() -> Parser:
    p = Parser("shoal bench host", __doc__)
    p.add_argument(
        "--batches",
        type=counts,
        default="1,64,256,512",
        metavar="N,M",
        help="numbers of decodes in a step (default %(default)s)",
    )
    p.add_argument("--steps", type=count, default=300, help="steps of each batch size (default 300)")
    results.add_options(p, "cpu.host")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    raw: dict[str, dict[str, float]] = {}
    for batch in args.batches:
        raw[f"b{batch}"] = decoding(batch, args.steps)
    raw["mixed"] = mixed(max(1, args.steps // 10))
    for name, found in raw.items():
        parts = ", ".join(f"{part} {us:.0f}" for part, us in found.items() if part != "step")
        print(f"{name:8s}{found['step']:8.0f} us a step: {parts}", flush=True)
    figures = [Figure(f"cpu.host.{name}.step_us", found["step"], "us", False) for name, found in raw.items()]
    print(f"written: {results.write(args.name, figures, {'us_a_step': raw}, folder=args.out).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
