"""A replica that computes nothing at the pace of a GPU: all of it is real but the runner, whose device is a clock.

So whatever stands in front of a replica can be measured on a machine that has no GPU.

    python -m bench.silent     # prints its ZeroMQ address, serves until it is killed
"""

import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from bench.host import Nothing
from worker.config import WorkerConfig
from worker.engine import Engine, Parts
from worker.plan import Plan
from worker.sampling import PendingSample, SampledTokens, Sampler

LOWEST_ID, HIGHEST_ID = 300, 10_000  # of what is said: whole words in the vocabularies of bench.shapes
CONTEXT_LENGTH = 8192
NOWHERE = Path("none")  # where its model is
CONFIG = WorkerConfig.model_validate(
    {"device": "cpu", "overlap": True, "max_running": 256, "token_budget": 8192, "context_length": CONTEXT_LENGTH}
)
"""What a GPU runs with."""


@dataclass(frozen=True)
class Pace:
    """How long a step takes, and each of its tokens: about what Llama-3.1-8B takes on an H200."""

    step_s: float = 0.0065
    token_s: float = 25e-6

    def seconds(self, tokens: int) -> float:
        return self.step_s + self.token_s * tokens


class SilentRunner(Nothing):
    """Says anything. `busy_until_s`: when the steps that were begun would have ended."""

    def __init__(self, max_running: int, pace: Pace) -> None:
        super().__init__(max_running)
        self.busy_until_s = 0.0
        self._pace = pace
        self._rng = np.random.default_rng(0)

    def forward(self, plan: Plan) -> torch.Tensor:
        """The step begins when the one before it ends."""
        logits = super().forward(plan)
        self.likeliest = torch.from_numpy(self._rng.integers(LOWEST_ID, HIGHEST_ID, len(logits)))
        self.busy_until_s = max(time.perf_counter(), self.busy_until_s) + self._pace.seconds(plan.num_tokens)
        return logits


class SilentSampler(Sampler):
    """Has the tokens when the step would have ended."""

    def __init__(self, runner: SilentRunner, max_running: int) -> None:
        super().__init__(max_running, runner.vocab_size, runner.device, runner.last_tokens)
        self._runner = runner

    def launch(self, logits: torch.Tensor, slots: np.ndarray, likeliest: torch.Tensor | None = None) -> PendingSample:
        pending = super().launch(logits, slots, likeliest)
        return cast(PendingSample, Paced(pending, self._runner.busy_until_s))


@dataclass(frozen=True)
class Paced:
    """A sample that is there at `ends_s`."""

    sample: PendingSample
    ends_s: float

    def result(self) -> SampledTokens:
        time.sleep(max(0.0, self.ends_s - time.perf_counter()))
        return self.sample.result()


def load_parts(model: Path, config: WorkerConfig, pace: Pace | None = None) -> Parts:
    """For `Engine` and `Server`, in place of `worker.engine.load_parts`. There is no model to look for."""
    runner = SilentRunner(config.max_running, pace or Pace())
    grammars: Any = SimpleNamespace(close=lambda: None)
    return Parts(cast(Any, runner), SilentSampler(runner, config.max_running), grammars)


def engine(pace: Pace | None = None) -> Engine:
    """One without a server."""
    return Engine(NOWHERE, CONFIG, load=lambda model, config: load_parts(model, config, pace))


def main() -> None:
    from worker.server import Server

    server = Server(NOWHERE, CONFIG, load=load_parts)
    print(server.address, flush=True)
    server.run()


if __name__ == "__main__":
    main()
