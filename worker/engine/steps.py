"""The parts of a step: schedule, launch, sample, finish. `worker.engine.loops` puts them in order."""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from worker.drafts.speculative_decoding import SpeculativeDecoding
from worker.engine.stage_timeline import StageTimeline
from worker.engine.step_watch import StepWatch
from worker.errors import DeviceLost, RankLost, one_line
from worker.executor.executor import Executor, ForwardOutput
from worker.messages import Failure
from worker.sampling.logprobs import PendingLogprobs, prompt_logprobs
from worker.sampling.pooling import PendingPooled
from worker.sampling.sampler import PendingSample, Sampler
from worker.scheduler.scheduled_step import ScheduledStep, SchedulerOutput
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Sequence
from worker.step import Plan
from worker.structured_output import GrammarQueue, GrammarState

log = logging.getLogger(__name__)

Launched = ForwardOutput | Exception | None
"""The result of a launch: logits, the error of this plan, or None for a plan without chunks."""

_NONE = np.empty(0, dtype=np.int64)


class InFlightStep(NamedTuple):
    """A step whose sampling was launched.

    | field | meaning |
    | --- | --- |
    | `step` | the step |
    | `chosen` | the chunks whose sequences get a token, by index |
    | `pending` | the tokens on their way to the host, if any chunk gets one |
    | `prompts` | log probabilities of prompts on their way to the host, by chunk |
    | `pooled` | sums of hidden states on their way to the host, if a prompt is pooled |
    | `is_computed` | whether there are logits; False after an error, and for a plan without chunks |
    | `done_event` | on a GPU, the end of the step |
    """

    step: ScheduledStep
    chosen: np.ndarray
    pending: PendingSample | None
    prompts: dict[int, PendingLogprobs]
    pooled: PendingPooled | None = None
    is_computed: bool = True
    done_event: torch.cuda.Event | None = None


class Steps:
    """The parts of a step on one replica. An error fails the sequences that it concerns, and no others; DeviceLost ends
    the engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        sampler: Sampler,
        timeline: StageTimeline,
        watch: StepWatch,
        grammar_queue: GrammarQueue,
        speculation: SpeculativeDecoding | None = None,
    ) -> None:
        self._speculation = speculation
        self.scheduler, self.timeline, self._watch = scheduler, timeline, watch
        self._executor, self._sampler, self._grammar_queue = executor, sampler, grammar_queue

    def schedule(self) -> ScheduledStep | None:
        """The next step, with the sampler's slots filled for it; None if there is none now."""
        output = self.scheduler.schedule()
        self._fill_sampler_slots(output)
        if output.idle_reason is not None:
            self.timeline.nothing(output.idle_reason)
        elif output.step is not None and len(output.step.plan):
            self.timeline.planned(output.step)
            self._watch.began(output.step)
        return output.step

    def waits_for_tokens(self, step: ScheduledStep) -> bool:
        """Whether the next step is to be scheduled after the tokens of `step`, the newest, are known: because drafts
        are verified in it, or because drafts may follow these tokens."""
        return bool(step.drafts) or self.scheduler.drafts_may_follow()

    def announce(self, step: ScheduledStep) -> None:
        """Tells the executor of a step ahead of its launch. Raises DeviceLost."""
        if len(step.plan):
            try:
                self._executor.announce(step.plan)
            except RankLost as error:
                raise DeviceLost(str(error)) from error

    def launch(self, step: ScheduledStep) -> Launched:
        """Computes the logits of a step; on a GPU, launches the work. Raises DeviceLost."""
        if not len(step.plan):
            return None
        try:
            return self._executor.forward(step.plan)
        except Exception as error:
            self._raise_if_lost(step.plan, error)
            return error

    def sample(self, step: ScheduledStep, launched: Launched) -> InFlightStep:
        """Launches sampling for the chunks that end at their sequence's last token. Without logits because of an error,
        the sequences of the step fail. Raises DeviceLost."""
        if not isinstance(launched, ForwardOutput):
            if launched is not None:
                self._fail(step.sequences_left, f"the model failed in step {step.plan.step}", launched)
            self.timeline.finished(step, computed=False)
            self._watch.finished(step, computed=False)
            return InFlightStep(step, _NONE, None, {}, is_computed=False)
        flight = self._sample(step, launched)
        if launched.hidden is not None:
            flight = flight._replace(pooled=self._pool(step, launched.hidden))
        self._executor.finish_step(step.plan)
        if launched.logits.is_cuda:
            flight = flight._replace(done_event=torch.cuda.current_stream().record_event())
        return flight

    def finish(self, flight: InFlightStep, wait: Callable[[torch.cuda.Event], None]) -> None:
        """Waits for the tokens of a step, with `wait` for its end on a GPU, and updates the scheduler. Raises
        DeviceLost."""
        step = flight.step
        try:
            if flight.done_event is not None:
                wait(flight.done_event)
            sampled = None if flight.pending is None else flight.pending.result()
            prompts = {chunk: pending.result() for chunk, pending in flight.prompts.items()}
            pooled = None if flight.pooled is None else flight.pooled.result()
        except Exception as error:
            self._raise_if_lost(step.plan, error)
            # Which tokens have been counted is unknown: every sequence that gets one in this step ends.
            chunks = {*flight.chosen.tolist(), *flight.prompts, *step.plan.hidden[:, 0].tolist()}
            left = [step.sequences[chunk] for chunk in sorted(chunks) if not step.dropped[chunk]]
            self._fail(left, f"the tokens of step {step.plan.step} were not to be had", error)
            sampled, prompts, pooled = None, {}, None
        self.scheduler.update(step, flight.chosen, sampled, prompts, pooled)
        self.timeline.finished(step)
        self._watch.finished(step)

    def record_times(self) -> None:
        """Passes the times of computed steps on to the time line."""
        self.timeline.record(self._executor.take_step_times())

    def free_sampler_slots(self, slots: list[int]) -> None:
        """Tells the sampler which slots the scheduler has freed."""
        for slot in slots:
            self._sampler.remove(slot)
            if self._speculation is not None:
                self._speculation.remove(slot)

    def _sample(self, step: ScheduledStep, launched: ForwardOutput) -> InFlightStep:
        plan, logits, chosen = step.plan, launched.logits, step.sampled
        num_rows = logits.shape[0]
        prompts: dict[int, PendingLogprobs] = {}
        if num_rows == len(chosen) == len(plan) and not step.prompted:  # each chunk has a row, as in most steps
            return self._launch_sampling(step, launched, chosen, plan.slots.astype(np.int64), None, prompts)
        ends = np.cumsum(plan.num_logits)
        for chunk in step.prompted:
            if step.dropped[chunk]:
                continue  # the sequence ended with the step before
            seq, end = step.sequences[chunk], int(ends[chunk])
            try:
                last = int(plan.starts[chunk] + plan.lengths[chunk])
                prompts[chunk] = _prompt_logprobs(seq, last, logits[end - int(plan.num_logits[chunk]) : end])
            except Exception as error:
                self._fail([seq], "log probabilities of the prompt failed", error)
            chosen = step.sampled  # without a sequence that failed
        if not len(chosen):
            return InFlightStep(step, chosen, None, prompts)
        slots = np.full(num_rows, -1, dtype=np.int64)  # by row of logits; -1 for rows that are not sampled
        slots[ends[chosen] - 1] = plan.slots[chosen]
        draft_ids = None
        if step.drafts:
            draft_ids = np.full(num_rows, -1, dtype=np.int64)
            for chunk, drafts in step.drafts.items():
                if not step.dropped[chunk]:
                    draft_ids[ends[chunk] - len(drafts) - 1 : ends[chunk] - 1] = drafts
                    slots[ends[chunk] - len(drafts) - 1 : ends[chunk]] = plan.slots[chunk]
        return self._launch_sampling(step, launched, chosen, slots, draft_ids, prompts)

    def _launch_sampling(
        self,
        step: ScheduledStep,
        launched: ForwardOutput,
        chosen: np.ndarray,
        slots: np.ndarray,
        draft_ids: np.ndarray | None,
        prompts: dict[int, PendingLogprobs],
    ) -> InFlightStep:
        """Launches sampling for the `chosen` chunks; `slots` and `draft_ids` are as in `Sampler.launch`. An error fails
        their sequences. Raises DeviceLost."""
        try:
            pending = self._sampler.launch(launched.logits, slots, launched.greedy_tokens, draft_ids)
            return InFlightStep(step, chosen, pending, prompts)
        except Exception as error:  # errors of single rows are in the result
            self._raise_if_lost(step.plan, error)
            self._fail([step.sequences[chunk] for chunk in chosen], f"sampling failed in step {step.plan.step}", error)
            return InFlightStep(step, chosen, None, prompts)

    def _pool(self, step: ScheduledStep, hidden: torch.Tensor) -> PendingPooled | None:
        """Launches the sums of a step's hidden states."""
        try:
            return PendingPooled(hidden, step.plan.hidden)
        except Exception as error:
            self._raise_if_lost(step.plan, error)
            chunks = step.plan.hidden[:, 0].tolist()
            self._fail([step.sequences[chunk] for chunk in chunks if not step.dropped[chunk]], "pooling failed", error)
            return None

    def _fill_sampler_slots(self, output: SchedulerOutput) -> None:
        """Tells the sampler which sequences left and which started. A sequence that it refuses fails alone."""
        self.free_sampler_slots(output.freed_slots)
        failed = False
        for seq in output.started:
            try:
                self._fill_sampler_slot(seq)
            except Exception as error:
                failed = True
                self._fail([seq], "the request could not be prepared", error)
        if failed:
            self.free_sampler_slots(self.scheduler.take_freed_slots())
            if output.step is not None:
                output.step.compact()

    def _fill_sampler_slot(self, seq: Sequence) -> None:
        compiled = self._grammar_queue.compiled(seq.request_id)
        # A sequence that was preempted starts with a new matcher, which accepts its outputs again.
        seq.grammar = GrammarState(compiled) if compiled is not None else None
        prompt_ids = seq.token_ids(0, seq.num_prompt).tolist()
        eos_token_ids = self._executor.eos_token_ids
        output_ids = seq.output_ids()
        self._sampler.add(seq.slot, seq.sampling, prompt_ids, output_ids, eos_token_ids, seq.grammar)
        if self._speculation is not None and seq.pool is None:
            self._speculation.add(seq.slot, prompt_ids, output_ids, seq.prediction_ids, seq.grammar)

    def _raise_if_lost(self, plan: Plan, error: Exception) -> None:
        if isinstance(error, DeviceLost):  # in a step that was announced meanwhile
            raise error
        if isinstance(error, RankLost):
            raise DeviceLost(str(error)) from error
        device = self._executor.device
        if _is_lost(device):
            raise DeviceLost(f"{device} failed in step {plan.step} and does not answer") from error

    def _fail(self, sequences: Iterable[Sequence], what: str, error: Exception) -> None:
        log.error("%s", what, exc_info=error)
        for request_id in [seq.request_id for seq in sequences]:
            log.error("request %s fails: %s", request_id, what, extra={"sequence": request_id})
            self.scheduler.fail(request_id, Failure("internal", f"{what}: {one_line(error)}"))


def _prompt_logprobs(seq: Sequence, end: int, logits: torch.Tensor) -> PendingLogprobs:
    """Log probabilities of the prompt tokens that follow the tokens of `logits` `[n, vocab_size]`, the last of which is
    before position `end`. The prompt's last token has no prompt token after it."""
    token_ids = seq.token_ids(end - len(logits) + 1, min(end + 1, seq.num_prompt))
    return prompt_logprobs(logits[: len(token_ids)], token_ids, seq.sampling.prompt_logprobs or 0)


def _is_lost(device: torch.device) -> bool:
    """Whether a GPU is beyond use: after an illegal access every call fails until the process ends."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False
