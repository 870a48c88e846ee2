"""What a step costs the host, whatever the device takes: scheduler, plan, tables, sampler and messages of a replica
whose runner computes nothing.

    shoal bench host --batches 1,64,256,512

Sequences of some hundred tokens decode all at once, with the next step prepared while one runs; `mixed` steps hold
prompts of 8,192 tokens beside 200 decodes. A figure is the median over the steps, in microseconds of this thread's own
time, so that other work on the machine counts little.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench import results
from bench.jobs import fresh
from bench.results import Figure

if TYPE_CHECKING:  # imports torch
    import torch

    from worker.engine import Engine
    from worker.messages import Output
    from worker.plan import Plan
    from worker.runner import Ran

DECODES_BESIDE, PROMPTS, PROMPT_TOKENS = 200, 8, 1024
SETTLE_STEPS = 20
VOCAB_SIZE = 10_240
PAGE_SIZE = 16


class Nothing:
    """A runner that keeps page tables and computes nothing: every token is the same."""

    def __init__(self, max_running: int) -> None:
        import torch

        from worker.stopwatch import Stopwatch
        from worker.tables import PageTables

        self.device = torch.device("cpu")
        self.vocab_size, self.page_size, self.context_length = VOCAB_SIZE, PAGE_SIZE, 8192
        self.num_pages = (max_running + PROMPTS) * 4096 // PAGE_SIZE
        self.eos_token_ids = (VOCAB_SIZE - 1,)
        self.last_tokens = torch.zeros(max_running + 1, dtype=torch.int64)
        self.likeliest: torch.Tensor | None = None
        self._logits = torch.zeros(max_running, VOCAB_SIZE)
        self._tokens = torch.zeros(max_running, dtype=torch.int64)
        self._stopwatch = Stopwatch.of(self.device)
        self._tables = PageTables(max_running, self.context_length // PAGE_SIZE, PAGE_SIZE)

    def forward(self, plan: "Plan") -> "torch.Tensor":
        """As `worker.runner.Runner.forward`."""
        self._stopwatch.begin()
        self._tables.update(plan)
        count = int(plan.num_logits.sum())
        self.likeliest = self._tokens[:count]
        return self._logits[:count]

    def sampled(self, plan: "Plan") -> None:
        """As `worker.runner.Runner.sampled`."""
        self._stopwatch.end(plan.step)

    def ran(self) -> "list[Ran]":
        """As `worker.runner.Runner.ran`."""
        from worker.runner import Ran

        return [Ran(0, step, span) for step, span in self._stopwatch.take()]

    def close(self) -> None:
        """There is nothing to give back."""


def replica(max_running: int) -> "Engine":
    """An engine whose runner computes nothing."""
    from worker.config import WorkerConfig
    from worker.engine import Engine, Parts
    from worker.sampling import Sampler

    def load(folder: Path, config: "WorkerConfig") -> Any:
        runner = Nothing(max_running)
        sampler = Sampler(max_running, VOCAB_SIZE, runner.device, runner.last_tokens)
        return Parts(runner, sampler, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]

    budget = PROMPTS * PROMPT_TOKENS
    settings = {"device": "cpu", "max_running": max_running, "token_budget": budget, "page_size": PAGE_SIZE}
    return Engine(Path("none"), WorkerConfig.model_validate({**settings, "overlap": True}), load=load)


class Clock:
    """Times steps, and their parts."""

    def __init__(self, engine: "Engine") -> None:
        self.steps: list[float] = []
        self.parts: dict[str, float] = defaultdict(float)
        self._engine = engine
        for name, owner, method in (
            ("schedule", engine.scheduler, "schedule"),
            ("tables", engine.runner, "forward"),
            ("launch sampling", engine.sampler, "launch"),
            ("update", engine.scheduler, "update"),
        ):
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def step(self) -> "list[Output]":
        """One step, and the message that it makes."""
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
        """Microseconds of a step, the median, and of its parts, on average; then begins anew."""
        found = {name: seconds / len(self.steps) * 1e6 for name, seconds in self.parts.items()}
        found = {"step": median(self.steps) * 1e6, **found}
        self.steps.clear()
        self.parts.clear()
        return found


def decoding(batch: int, steps: int) -> dict[str, float]:
    """Steps of `batch` decodes."""
    engine = replica(batch)
    _add(engine, batch, 300, 2 * SETTLE_STEPS + steps + batch)
    clock = Clock(engine)
    while len(clock.step()) < batch:
        continue  # some prompts have yet to be computed
    for _ in range(SETTLE_STEPS):
        clock.step()
    clock.read()
    for _ in range(steps):
        clock.step()
    found = clock.read()
    engine.close()
    return found


def mixed(steps: int) -> dict[str, float]:
    """Steps of as many prompts as the budget holds, beside decodes."""
    engine = replica(DECODES_BESIDE + 3 * PROMPTS)  # a prompt keeps its slot until the step after its last has begun
    _add(engine, DECODES_BESIDE, 300, 2 * SETTLE_STEPS + 2 * steps + DECODES_BESIDE)
    clock = Clock(engine)
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


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="shoal bench host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--batches", default="1,64,256,512", metavar="N,M", help="sequences that decode (default %(default)s)"
    )
    p.add_argument("--steps", type=int, default=300, help="of each kind (default 300)")
    p.add_argument("--name", default="cpu.host", help="of the result file (default cpu.host)")
    p.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="default: bench/results")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    raw: dict[str, dict[str, float]] = {}
    for batch in map(int, args.batches.split(",")):
        raw[f"b{batch}"] = decoding(batch, args.steps)
    raw["mixed"] = mixed(max(1, args.steps // 10))
    for name, found in raw.items():
        parts = ", ".join(f"{part} {us:.0f}" for part, us in found.items() if part != "step")
        print(f"{name:8s}{found['step']:8.0f} us a step: {parts}", flush=True)
    figures = [Figure(f"cpu.host.{name}.step_us", found["step"], "us", False) for name, found in raw.items()]
    path = results.write(args.name, figures, {"us_a_step": raw}, folder=args.out)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
