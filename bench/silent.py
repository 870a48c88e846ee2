"""A replica that computes nothing: scheduler, pages, cache and socket are real, the device is a clock.

So whatever stands in front of a replica can be measured at the pace of a GPU on a machine that has none.

    python -m bench.silent FOLDER     # of a model; prints its ZeroMQ address, serves until it is killed
"""

import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from worker.config import WorkerConfig
from worker.engine import Parts
from worker.grammar import CompiledGrammar, GrammarError
from worker.messages import Grammar
from worker.models.config import read_config
from worker.plan import Plan
from worker.sampling import SampledTokens

LOWEST_ID, HIGHEST_ID = 300, 10_000  # of what is said: whole words in the vocabularies of bench.shapes
KV_TOKENS = 900_000
CONTEXT_LENGTH = 8192
CONFIG = WorkerConfig.model_validate(
    {
        "device": "cpu",
        "overlap": True,
        "max_running": 256,
        "token_budget": 8192,
        "context_length": CONTEXT_LENGTH,
        "kv_tokens": KV_TOKENS,
    }
)
"""What a GPU runs with."""


@dataclass(frozen=True)
class Pace:
    """How long a step of `tokens` takes: about what Llama-3.1-8B takes on an H200."""

    step_s: float = 0.0065
    token_s: float = 25e-6

    def seconds(self, tokens: int) -> float:
        return self.step_s + self.token_s * tokens


class SilentRunner:
    """`worker.runner.Runner` without a model. `busy_until_s`: when the steps that were begun would have ended."""

    def __init__(self, model: Path, config: WorkerConfig, pace: Pace) -> None:
        self.page_size = config.page_size
        self.num_pages = (config.kv_tokens or KV_TOKENS) // config.page_size
        self.vocab_size = read_config(model).vocab_size
        self.context_length = config.context_length or CONTEXT_LENGTH
        self.eos_token_ids = ()
        self.device = torch.device("cpu")
        self.busy_until_s = 0.0
        self._pace = pace

    def forward(self, plan: Plan) -> torch.Tensor:
        """Nothing, in the shape of logits. The step begins when the one before it ends."""
        self.busy_until_s = max(time.perf_counter(), self.busy_until_s) + self._pace.seconds(plan.num_tokens)
        return torch.empty(int(plan.num_logits.sum()), 0)

    def close(self) -> None:
        pass


class SilentSampler:
    """`worker.sampling.Sampler` that says anything."""

    def __init__(self, runner: SilentRunner) -> None:
        self._runner = runner
        self._rng = np.random.default_rng(0)

    def add(self, slot: int, *_: Any) -> None:
        pass

    def remove(self, slot: int) -> None:
        pass

    def launch(self, logits: torch.Tensor, slots: np.ndarray) -> "_Pending":
        said = self._rng.integers(LOWEST_ID, HIGHEST_ID, np.count_nonzero(slots >= 0))
        return _Pending(self._runner.busy_until_s, SampledTokens(said, {}, {}, []))


@dataclass(frozen=True)
class _Pending:
    ends_s: float
    tokens: SampledTokens

    def result(self) -> SampledTokens:
        """When the step would have ended."""
        time.sleep(max(0.0, self.ends_s - time.perf_counter()))
        return self.tokens


class _NoGrammars:
    def submit(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        future: Future[CompiledGrammar] = Future()
        future.set_exception(GrammarError("a silent replica knows no grammars"))
        return future

    def close(self) -> None:
        pass


def load_parts(model: Path, config: WorkerConfig, pace: Pace | None = None) -> Parts:
    """For `Engine` and `Server`, in place of `worker.engine.load_parts`."""
    runner = SilentRunner(model, config, pace or Pace())
    return Parts(cast(Any, runner), cast(Any, SilentSampler(runner)), cast(Any, _NoGrammars()))


def main(argv: list[str] | None = None) -> None:
    """Serves the model of a folder."""
    from worker.server import Server

    (folder,) = sys.argv[1:] if argv is None else argv
    server = Server(Path(folder), CONFIG, load=load_parts)
    print(server.address, flush=True)
    server.run()


if __name__ == "__main__":
    main()
