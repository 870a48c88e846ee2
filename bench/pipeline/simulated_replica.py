"""A replica without devices: the real scheduler, in the virtual time of `bench/pipeline/simulator.py`.

All decisions are made by the real code: scheduler, policy, admission, forecast, radix tree and pages. Nothing is
computed: all sampled tokens are the same.
"""

from collections.abc import Callable, Collection, Iterable

import numpy as np

from bench.pipeline.simulator import MicroBatch, Request, SimulatedClock
from pipeline.shape import BatchShape
from pipeline.stage_backlog import StageBacklog
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore, predicts
from worker.engine.stage_timeline import LEADS_S
from worker.kv_layout import KVGroup, KVLayout
from worker.lengths import OutputLengthPredictor
from worker.messages import Generate, SamplingParams
from worker.scheduler.scheduled_step import ScheduledStep
from worker.scheduler.scheduler import Scheduler
from worker.step import SampledTokens

VOCAB_SIZE = 1 << 15  # upper bound of the prompts' token ids


class SimulatedReplica:
    """Implements `bench.pipeline.simulator.SimulatedScheduler`."""

    def __init__(
        self,
        config: WorkerConfig,
        costs: CostStore,
        clock: SimulatedClock,
        prompt_ids: Callable[[Request], list[int]],
        eos_token_ids: Collection[int] = (),
        lengths: OutputLengthPredictor | None = None,
    ) -> None:
        """`costs`: cost models of all stages, which learn as in a real replica. `prompt_ids`: returns a request's
        prompt, of ids below VOCAB_SIZE. `eos_token_ids`, `lengths`: the scheduler's. `config` must have `kv_tokens` and
        `context_length`."""
        assert config.kv_tokens is not None and config.context_length is not None
        self._costs, self._clock, self._prompt_ids = costs, clock, prompt_ids
        self._ahead = StageBacklog(config.pp)
        self._idle_reason: str | None = None
        self._tokens = np.zeros(config.max_running, dtype=np.int64)
        self.scheduler = Scheduler(
            config,
            KVLayout(config.page_size, (KVGroup("full", (), 0, config.kv_tokens // config.page_size),)),
            vocab_size=VOCAB_SIZE,
            context_length=config.context_length,
            eos_token_ids=eos_token_ids,
            policy=costs.policy(config, overlap=config.overlap is not False),
            ahead_s=lambda: self._ahead.free_s(clock()),
            returning_s=self._returning_s,
            clock=clock,
            lengths=lengths,
        )

    def arrive(self, request: Request) -> None:
        name, prompt_ids, sampling = str(request.number), self._prompt_ids(request), self.sampling(request)
        if not self.scheduler.add(Generate(request_id=name, prompt_ids=prompt_ids, sampling=sampling)):
            failure = self.scheduler.take_outputs()[-1].failure
            raise ValueError(f"request {request.number} is refused: {failure.message if failure else 'it has ended'}")

    def schedule(self) -> MicroBatch | None:
        if self._spare_s() > 0.0:
            return None
        output = self.scheduler.schedule()
        self._idle_reason, step = output.idle_reason, output.step
        if step is None:
            return None
        self._ahead.sent(step.plan.step, self._clock(), [model.predict(step.shape) for model in self._costs.models])
        started = [int(seq.request_id) for seq in output.started]
        return MicroBatch(step.plan.step, step.shape, started, step.tokens_from_step, step)

    def ask_again_s(self) -> float:
        return self._spare_s() or self.scheduler.ask_again_s()

    def idle_reason(self) -> str | None:
        return self._idle_reason

    def ended(self, batch: MicroBatch, stage: int, at_s: float) -> None:
        self._ahead.ended(batch.step, stage, at_s)

    def finish(self, batch: MicroBatch, seconds: list[float]) -> Iterable[int]:
        self._costs.observe(batch.shape, seconds)
        step = batch.plan
        chosen = np.flatnonzero(step.samples & ~step.dropped)
        self.scheduler.update(step, chosen, SampledTokens(self.tokens_of(step, chosen), {}, {}, []), {})
        return [int(output.request_id) for output in self.scheduler.take_outputs() for _ in output.token_ids]

    def sampling(self, request: Request) -> SamplingParams:
        """The parameters of a request, whose output only its limit ends."""
        return SamplingParams(max_tokens=request.output, temperature=0.0, ignore_eos=True)

    def tokens_of(self, step: ScheduledStep, chosen: np.ndarray) -> np.ndarray:
        """The tokens that are sampled for the `chosen` chunks [n], int64 [n]."""
        return self._tokens[: len(chosen)]

    def decode_s(self, shape: BatchShape) -> float:
        return self._costs.decode_s(shape)

    def _spare_s(self) -> float:
        """Seconds by which the next step is postponed: as `Engine.spare_s`, with its initial lead."""
        config = self.scheduler.config
        if config.pp > 1 or config.overlap is False or not predicts(config) or self.scheduler.is_full:
            return 0.0
        return max(0.0, self._ahead.free_s(self._clock()) - LEADS_S[1])

    def _returning_s(self, step: ScheduledStep) -> float:
        return self._ahead.returning_s(step.plan.step, self._clock())
