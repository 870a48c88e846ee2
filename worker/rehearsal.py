"""A replica without its devices: the scheduler, in the virtual time of `pipeline/simulate.py`.

All that decides is the real thing: scheduler, policy, admission, forecast, tree and pages. Nothing is computed: every
token that is sampled is the same.
"""

from collections.abc import Callable, Iterable

import numpy as np

from pipeline.ahead import Ahead
from pipeline.shape import BatchShape
from pipeline.simulate import Clock, MicroBatch, Request
from radix.pages import PagePool
from radix.tree import Tree
from worker.batch import Step
from worker.config import WorkerConfig
from worker.costs import Costs
from worker.messages import Generate, SamplingParams
from worker.sampling import SampledTokens
from worker.scheduler import Scheduler

VOCAB_SIZE = 1 << 15  # that of prompts, at least


class Rehearsal:
    """Follows `pipeline.simulate.Replica`."""

    def __init__(
        self, config: WorkerConfig, costs: Costs, clock: Clock, prompt_ids: Callable[[Request], list[int]]
    ) -> None:
        """`costs`, of every stage, are learned as they are in a replica. `prompt_ids` gives a request's prompt, of ids
        below VOCAB_SIZE. `config` must say how large the KV cache is and how long a context may be."""
        assert config.kv_tokens is not None and config.context_length is not None
        self._costs, self._clock, self._prompt_ids = costs, clock, prompt_ids
        self._ahead = Ahead(config.pp)
        self._tokens = np.zeros(config.max_running, dtype=np.int64)
        self.scheduler = Scheduler(
            config,
            Tree(config.page_size, PagePool(config.kv_tokens // config.page_size, config.page_size)),
            vocab_size=VOCAB_SIZE,
            context_length=config.context_length,
            eos_token_ids=(),
            policy=costs.policy(config, overlap=config.overlap is not False),
            ahead_s=lambda: self._ahead.free_s(clock()),
            returning_s=self._returning_s,
            clock=clock,
        )

    def arrive(self, request: Request) -> None:
        sampling = SamplingParams(max_tokens=request.output, temperature=0.0, ignore_eos=True)
        name, prompt_ids = str(request.number), self._prompt_ids(request)
        if not self.scheduler.add(Generate(request_id=name, prompt_ids=prompt_ids, sampling=sampling)):
            failure = self.scheduler.take_outputs()[-1].failure
            raise ValueError(f"request {request.number} is refused: {failure.message if failure else 'it has ended'}")

    def schedule(self) -> MicroBatch | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        self._ahead.sent(step.plan.step, self._clock(), [model.predict(step.shape) for model in self._costs.models])
        started = [int(seq.request_id) for seq in self.scheduler.running.started]
        return MicroBatch(step.plan.step, step.shape, started, step.after, step)

    def ask_again_s(self) -> float:
        return self.scheduler.ask_again_s()

    def found_nothing(self) -> str | None:
        return self.scheduler.found_nothing

    def ended(self, batch: MicroBatch, stage: int, at_s: float) -> None:
        self._ahead.ended(batch.step, stage, at_s)

    def finish(self, batch: MicroBatch, seconds: list[float]) -> Iterable[int]:
        self._costs.observe(batch.shape, seconds)
        step = batch.plan
        chosen = np.flatnonzero(step.gives & ~step.gone)
        self.scheduler.update(step, chosen, SampledTokens(self._tokens[: len(chosen)], {}, {}, []), {})
        self.scheduler.running.vacated.clear()
        return [int(output.request_id) for output in self.scheduler.take_outputs() for _ in output.token_ids]

    def decode_s(self, shape: BatchShape) -> float:
        return self._costs.decode_s(shape)

    def _returning_s(self, step: Step) -> float:
        return self._ahead.returning_s(step.plan.step, self._clock())
