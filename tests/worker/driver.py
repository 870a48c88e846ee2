"""A scheduler driven without an engine, against an executor that answers wrongly if a page, a position or a token is
wrong."""

import math
import random
from collections import defaultdict

import numpy as np
import torch

from pipeline.shape import BatchShape
from tests.worker.fakes import any_models
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.messages import Generate, Output, SamplingParams
from worker.scheduler.scheduled_step import ScheduledStep
from worker.scheduler.scheduler import Scheduler
from worker.step import Plan, SampledTokens

STAGES = any_models(4)


class Driver:
    """A scheduler with a fake executor: what `worker.engine.engine` does, without tensors. With `overlap`, the tokens
    of a step come to the scheduler after the next one was planned and computed."""

    def __init__(self, executor, *, eos: tuple[int, ...] = (), overlap: bool = False, **config) -> None:
        self.executor = executor
        self.overlap = overlap
        self.flight: tuple[ScheduledStep, np.ndarray, SampledTokens] | None = None
        self.now_s = 0.0
        self.complete: list[int] = []  # of the next step's rows, those whose grammar is complete with their token
        self.config = WorkerConfig(page_size=executor.page_size, **config)
        self.scheduler = Scheduler(
            self.config,
            executor.layout,
            vocab_size=executor.vocab_size,
            context_length=executor.context_length,
            eos_token_ids=eos,
            policy=CostStore(STAGES[: self.config.pp]).policy(self.config, overlap=False),
            returning_s=self.returning_s,
            clock=lambda: self.now_s,
        )
        self.tree = self.scheduler.kv_cache.tree
        self.outputs: dict[str, list[Output]] = defaultdict(list)

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 5, **fields) -> bool:
        sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, temperature=0)
        return self.scheduler.add(Generate(request_id=request_id, prompt_ids=prompt, sampling=sampling, **fields))

    def returning_s(self, step: ScheduledStep) -> float:
        return math.inf

    def step(self) -> Plan | None:
        step = self.scheduler.schedule().step
        if step is None:
            self.land()
        else:
            assert 0 < step.plan.num_tokens <= self.config.token_budget
            assert_counted(step)
            rows = self.executor.forward(step.plan).logits.argmax(1)
            self.land()
            self.flight = step, *self.sample(step, rows)
            if not self.overlap:
                self.land()
        self.collect()
        return step.plan if step is not None else None

    def sample(self, step: ScheduledStep, rows: torch.Tensor) -> tuple[np.ndarray, SampledTokens]:
        chosen = np.flatnonzero(step.samples & ~step.dropped)
        tokens = rows[np.cumsum(step.plan.num_logits)[chosen] - 1]
        self.executor.last_tokens[step.plan.slots[chosen]] = tokens
        complete, self.complete = self.complete, []
        return chosen, SampledTokens(tokens.numpy(), {}, {}, complete)

    def land(self) -> None:
        if self.flight is not None:
            step, chosen, sampled = self.flight
            self.flight = None
            self.scheduler.update(step, chosen, sampled, {})

    def collect(self) -> None:
        for output in self.scheduler.take_outputs():
            assert not (self.outputs[output.request_id] and self.outputs[output.request_id][-1].finish_reason)
            self.outputs[output.request_id].append(output)

    def run(self, max_steps: int = 10_000) -> list[Plan]:
        plans = []
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.flight:
                return plans
            plan = self.step()
            self.scheduler.check_integrity()
            if plan is not None:
                plans.append(plan)
        raise AssertionError("it does not come to an end")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def reason(self, request_id: str) -> str | None:
        return self.outputs[request_id][-1].finish_reason if self.outputs[request_id] else None

    def failure(self, request_id: str):
        assert self.reason(request_id) == "error"
        return self.outputs[request_id][-1].failure


def assert_counted(step: ScheduledStep) -> None:
    """A step's shape, by which its time is predicted, is that of its chunks."""
    shape = BatchShape(zip(step.plan.starts.tolist(), step.plan.lengths.tolist(), strict=True))
    assert all(getattr(step.shape, name) == getattr(shape, name) for name in BatchShape.__slots__)


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=n)
