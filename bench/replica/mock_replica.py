"""A mock replica at the pace of a GPU: everything is real except the executor, which computes nothing and keeps time.

With this replica, routers and proxies can be measured on a machine without a GPU.

    python -m bench.replica.mock_replica     # prints its ZeroMQ address, serves until it is killed
"""

import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from bench.replica.null_executor import NullExecutor
from bench.secret import SECRET
from worker.config import WorkerConfig
from worker.engine.engine import Components, Engine
from worker.executor.executor import ForwardOutput
from worker.sampling.sampler import PendingSample, Sampler
from worker.step import Plan, SampledTokens

LOWEST_ID, HIGHEST_ID = 300, 10_000  # of output: whole words in the vocabularies of bench.replica.dummy_models
CONTEXT_LENGTH = 8192
NOWHERE = Path("none")  # in place of a model's folder
CONFIG = WorkerConfig.model_validate(
    {"device": "cpu", "overlap": True, "max_running": 256, "token_budget": 8192, "context_length": CONTEXT_LENGTH}
)
"""Settings such as a replica on a GPU has."""


@dataclass(frozen=True)
class Pace:
    """Duration of a step: a constant, and a part per token. The defaults are about those of Llama-3.1-8B on an H200."""

    step_s: float = 0.0065
    token_s: float = 25e-6

    def seconds(self, tokens: int) -> float:
        return self.step_s + self.token_s * tokens


class MockExecutor(NullExecutor):
    """An executor that gives random tokens. `busy_until_s`: when the last step that was launched would end."""

    def __init__(self, max_running: int, pace: Pace) -> None:
        super().__init__(max_running, max_prompts=8)
        self.busy_until_s = 0.0
        self._pace = pace
        self._rng = np.random.default_rng(0)

    def forward(self, plan: Plan) -> ForwardOutput:
        """Launches a step, which begins when the step before it ends."""
        logits = super().forward(plan).logits
        greedy_tokens = torch.from_numpy(self._rng.integers(LOWEST_ID, HIGHEST_ID, len(logits)))
        self.busy_until_s = max(time.perf_counter(), self.busy_until_s) + self._pace.seconds(plan.num_tokens)
        return ForwardOutput(logits, greedy_tokens)


class MockSampler(Sampler):
    """A sampler whose tokens are ready when the step would end."""

    def __init__(self, executor: MockExecutor, max_running: int) -> None:
        super().__init__(max_running, executor.vocab_size, executor.device, executor.last_tokens)
        self._executor = executor

    def launch(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        likeliest: torch.Tensor | None = None,
        draft_ids: np.ndarray | None = None,
    ) -> PendingSample:
        pending = super().launch(logits, slots, likeliest, draft_ids)
        return cast(PendingSample, Paced(pending, self._executor.busy_until_s))


@dataclass(frozen=True)
class Paced:
    """A pending sample that is ready at `ends_s`."""

    sample: PendingSample
    ends_s: float

    def result(self) -> SampledTokens:
        time.sleep(max(0.0, self.ends_s - time.perf_counter()))
        return self.sample.result()


def load_components(model: Path, config: WorkerConfig, pace: Pace | None = None) -> Components:
    """Components for `Engine` and `Server`, in place of those of `worker.engine.engine.load_components`. `model` is not
    read."""
    executor = MockExecutor(config.max_running, pace or Pace())
    grammars: Any = SimpleNamespace(close=lambda: None)
    return Components(executor, MockSampler(executor, config.max_running), grammars)


def engine(pace: Pace | None = None) -> Engine:
    """A mock engine without a server."""
    return Engine(NOWHERE, CONFIG, load=lambda model, config: load_components(model, config, pace))


def main() -> None:
    from worker.engine.server import Server

    server = Server(NOWHERE, CONFIG, secret=SECRET, load=load_components)
    print(server.address, flush=True)
    server.run()


if __name__ == "__main__":
    main()
