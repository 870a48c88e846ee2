"""One replica without its socket: the scheduler, the model, the sampler and the grammars, put together.

A step reads `schedule -> forward -> sample -> update`. The scheduler sees plans and sampled tokens only, so a plan may
as well go to other ranks. With overlap, step n+1 is planned and launched while the device still runs step n; then the
tokens of n are waited for, and what the next tokens depend on (penalties, grammars, who has ended) is up to date when
the sampling of n+1 is launched. Only the tokens themselves pass from step to step on the device. Of a pipeline this is
the last stage: steps are sent through those before it well before it comes to its own part of them.
"""

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pipeline.meter import Meter
from radix.events import Event, Stored
from radix.pages import PagePool
from radix.tree import Tree
from worker.batch import Step
from worker.config import WorkerConfig
from worker.costs import Costs, predicts
from worker.grammar import Awaited, GrammarCompiler, GrammarState
from worker.logprobs import PendingLogprobs, prompt_logprobs
from worker.messages import Failure, Generate, Load, Output, SamplingParams, TokenLogprobs
from worker.parallel import RankLost
from worker.plan import Plan
from worker.processes import open_runner
from worker.ranks import Leader
from worker.refusal import in_one_line
from worker.request import Sequence
from worker.runner import Runner, settled
from worker.sampling import PendingSample, Sampler
from worker.scheduler import Scheduler
from worker.timeline import Timeline

log = logging.getLogger(__name__)

_NONE = np.empty(0, dtype=np.int64)
TOLD_S = 2.0  # longest time that what a stage tells may be on its way
MOST_AWAY_S = 0.01  # a launch that takes longer has waited for the device
ASK_EVERY_S = 2e-4  # how often it is looked whether a pipeline needs its next step, while there is nothing else to do


class DeviceLost(RuntimeError):
    """A device no longer computes, or a rank is gone. Nothing that this process holds can be saved: end it, start
    another."""


class Parts(NamedTuple):
    """What an engine is made of, beside the scheduler and the tree."""

    runner: Runner | Leader
    sampler: Sampler
    grammars: GrammarCompiler
    costs: Costs = Costs()


def load_parts(
    model_dir: Path,
    config: WorkerConfig,
    open_runner: Callable[[Path, WorkerConfig], Runner | Leader] = open_runner,
    cost_folder: Path | None = None,
) -> Parts:
    """Loads the model of a folder. What steps cost is learned, where it matters, and kept in `cost_folder`. Raises
    whatever the model's files or the device have to complain about."""
    runner = open_runner(model_dir, config)
    sampler = Sampler(config.max_running, runner.vocab_size, runner.device, runner.last_tokens)
    grammars = GrammarCompiler(model_dir, runner.vocab_size, config.grammar_timeout_s, runner.eos_token_ids)
    costs = Costs()
    if config.pp > 1 or predicts(config):
        costs = Costs.of(model_dir, config, runner.device, cost_folder)
    return Parts(runner, sampler, grammars, costs)


@dataclass
class Finished:
    """What became of one prompt of `Engine.generate`. `token_ids` are the outputs, a stop token included."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str = ""
    failure: Failure | None = None
    cached_tokens: int = 0

    def take(self, output: Output) -> None:
        """What has come of the prompt since."""
        self.token_ids += output.token_ids
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.failure = output.failure


class _Flight(NamedTuple):
    """A step that was launched: the chunks whose sequences get a token, what its results are asked of, and on a GPU
    what happens when it has been computed."""

    step: Step
    chosen: np.ndarray
    pending: PendingSample | None
    prompts: dict[int, PendingLogprobs]
    ended: torch.cuda.Event | None = None


class Engine:
    """Runs requests. One thread at a time; only `on_ready` is called from another."""

    def __init__(
        self,
        model_dir: Path,
        config: WorkerConfig,
        *,
        on_event: Callable[[Event], None] | None = None,
        on_ready: Callable[[], None] | None = None,
        load: Callable[[Path, WorkerConfig], Parts] = load_parts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_event` is told of every change of the radix tree. `on_ready` is called, from any thread, when a request
        that waited outside the queue wants a `step`. `load` makes the parts."""
        config = settled(config)
        self.runner, self.sampler, self.grammars, self.costs = load(Path(model_dir), config)
        self.tree = Tree(config.page_size, PagePool(self.runner.num_pages, config.page_size), on_event=on_event)
        self._overlap = self.runner.device.type != "cpu" if config.overlap is None else config.overlap
        self.timeline = Timeline(config.pp, self.costs)
        self.scheduler = Scheduler(
            config,
            self.tree,
            vocab_size=self.runner.vocab_size,
            context_length=self.runner.context_length,
            eos_token_ids=self.runner.eos_token_ids,
            policy=self.costs.policy(config, self._overlap),
            ahead_s=self._ahead_s if config.pp > 1 and self._overlap else lambda: 0.0,
            returning_s=self._returning_s,
            clock=clock,
        )
        self._under_way: deque[Step] = deque()  # of a pipeline, those that only the stages before have begun
        self._launch_s = 0.0  # what it took to launch the newest step
        self._away_s = 0.0  # for how long from now on no step is going to be sent
        self._flight: _Flight | None = None  # what is launched and not finished between two steps
        self._sampled: _Flight | None = None  # what was sampled last, finished or not
        self._awaited = Awaited(self.grammars, on_ready)

    # ------------------------------------------------------------ requests

    def add(self, request: Generate) -> None:
        """Takes a request; what becomes of it comes out of `step`. Raises ValueError for an id that is in use."""
        grammar = request.sampling.grammar
        if self.scheduler.add(request, ready=grammar is None) and grammar is not None:
            self._awaited.submit(request.request_id, grammar)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets these requests and frees their pages at once. Unknown ids are ignored. No output follows."""
        request_ids = list(request_ids)
        self.scheduler.abort(request_ids)
        for request_id in request_ids:
            self._awaited.forget(request_id)
        self._leave_slots()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do now. A grammar that compiles is none: `on_ready` tells."""
        in_flight = self._flight is not None or len(self._under_way) > 0
        return self.scheduler.has_work or in_flight or self._awaited.has_done

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Computes one batch. Returns what there is to tell: with overlap, of the batch before. Raises DeviceLost."""
        for request_id, failure in self._awaited.take():
            if failure is None:
                self.scheduler.release(request_id)
            else:
                self.scheduler.fail(request_id, failure)
        self._take_times()
        step = self._next_step()
        logits = self._launch(step.plan) if step is not None and len(step.plan) else None
        self._finish_flight()
        if step is not None:
            self._flight = self._sample(step, logits)
            if isinstance(logits, torch.Tensor):
                self.runner.sampled(step.plan)
                if logits.is_cuda:
                    self._flight = self._flight._replace(ended=torch.cuda.current_stream().record_event())
                self._sampled = self._flight
            else:
                self.timeline.finished(step, computed=False)
            if not self._overlap:
                self._finish_flight()
        outputs = self.scheduler.take_outputs()
        if not self.has_work:
            self._rest()
        self._leave_slots()
        if len(self._awaited):
            for output in outputs:
                if output.finish_reason is not None:
                    self._awaited.forget(output.request_id)
        return outputs

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | list[SamplingParams],
        progress: Callable[[int], None] | None = None,
    ) -> list[Finished]:
        """Runs a batch of prompts to its end, as one user without a server. `sampling` is for all or one for each.
        `progress` is called after every step with the number of prompts done. Returns in the order of `prompts`; one
        that could not run has a `failure`."""
        each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        finished = {f"prompt-{i}": Finished() for i in range(len(prompts))}
        arrivals = zip(finished, prompts, each, strict=True)
        num_done = 0
        with heap_at_rest():
            try:
                while num_done < len(prompts):
                    # Those that are preempted wait too, beyond what may.
                    room = max(0, self.scheduler.config.max_waiting - self.scheduler.num_waiting)
                    for name, prompt, params in islice(arrivals, room):
                        self.add(Generate(request_id=name, prompt_ids=prompt, sampling=params))
                    if not self.has_work:
                        self._awaited.wait()
                    for output in self.step():
                        finished[output.request_id].take(output)
                        num_done += output.finish_reason is not None
                    if progress is not None:
                        progress(num_done)
            finally:  # nothing goes on after an interrupt
                self.abort(name for name, result in finished.items() if not result.finish_reason)
        return list(finished.values())

    # ------------------------------------------------------------ what is there

    def load(self) -> Load:
        """What the replica carries. `incarnation` and `bookings_seen` are left to the caller."""
        load = self.scheduler.load()
        load.stage_seconds = self.timeline.spent()
        return load

    def meter(self) -> Meter:
        """Where the stages' time went. While nothing runs: all stages have told, unless one takes more than TOLD_S."""
        deadline_s = time.monotonic() + TOLD_S
        self._take_times()
        while self.timeline.meter.under_way and time.monotonic() < deadline_s:
            time.sleep(0.001)
            self._take_times()
        return self.timeline.meter

    def trace(self) -> str:
        """The newest steps on all stages, as JSON that Perfetto opens (https://ui.perfetto.dev)."""
        self._take_times()
        return self.timeline.meter.trace_json()

    def snapshot(self) -> list[Stored]:
        """Events that build the tree as it is now."""
        return self.tree.snapshot()

    def reset_cache(self) -> None:
        """Forgets every cached prefix. Raises ValueError while a request runs."""
        self.tree.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, slot and sequence is where it belongs. Walks everything."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Ends the compiler's thread and the other ranks. The engine is of no use afterwards."""
        self.costs.save()
        self.grammars.close()
        self.runner.close()

    # ------------------------------------------------------------ the parts of a step

    def _next_step(self) -> Step | None:
        """The step that is this stage's turn: of a pipeline the oldest that was sent on its way."""
        if self.scheduler.config.pp == 1:
            return self._schedule()
        # What the first stage is going to need while a step is launched here sets out before.
        self._away_s = min(self._launch_s, MOST_AWAY_S) if self._under_way else 0.0
        self._fill_stages()
        self._away_s = 0.0
        return self._under_way.popleft() if self._under_way else None

    def _fill_stages(self) -> None:
        """Of a pipeline, sends as many steps on their way as the policy begins."""
        while (step := self._schedule()) is not None:
            self._under_way.append(step)
            if len(step.plan):
                try:
                    self.runner.expect(step.plan)
                except RankLost as error:
                    raise DeviceLost(str(error)) from error

    def _ahead_s(self) -> float:
        """Of a pipeline, the time that is left to send the first stage its next step."""
        return max(0.0, self.timeline.ahead_s() - self._away_s)

    def _returning_s(self, step: Step) -> float:
        """Of a pipeline, the time until the tokens of a step lie on the last stage's device."""
        if self._sampled is None or self._sampled.step is not step:
            return math.inf
        return self.timeline.returning_s(step) if self._sampled.ended is not None else 0.0

    def _send_until(self, ended: torch.cuda.Event) -> None:
        """Waits for the device, and sends steps whenever the policy wants to be asked again."""
        while (wait_s := self.scheduler.ask_again_s()) < math.inf and not ended.query():
            if wait_s > 0:
                time.sleep(min(wait_s, ASK_EVERY_S))
                self._take_times()
            else:
                self._fill_stages()
        ended.synchronize()

    def _take_times(self) -> None:
        """What has been computed since."""
        self.timeline.take(self.runner.ran())

    def _rest(self) -> None:
        """There is nothing to do."""
        self._take_times()
        self.timeline.nothing("nothing_to_do")
        self.costs.save_if_due()

    def _schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        self._take_slots(step)
        if self.scheduler.found_nothing is not None:
            self.timeline.nothing(self.scheduler.found_nothing)
        elif step is not None and len(step.plan):
            self.timeline.planned(step)
        return step

    def _launch(self, plan: Plan) -> torch.Tensor | Exception:
        begin_s = time.monotonic()
        logits = self._forward(plan)
        self._launch_s = time.monotonic() - begin_s
        return logits

    def _forward(self, plan: Plan) -> torch.Tensor | Exception:
        """The logits of a step, which the device may yet have to compute; or why there are none."""
        try:
            return self.runner.forward(plan)
        except Exception as error:
            self._raise_if_lost(plan, error)
            return error

    def _sample(self, step: Step, logits: torch.Tensor | Exception | None) -> "_Flight":
        """Begins to sample the next token of every sequence in a step that lacks none. Of a step without logits, all
        fail, and they alone."""
        plan = step.plan
        if isinstance(logits, Exception):
            self._fail(step.sequences_left, f"the model failed in step {plan.step}", logits)
        if not isinstance(logits, torch.Tensor):
            return _Flight(step, _NONE, None, {})
        ends = np.cumsum(plan.num_logits)
        prompts: dict[int, PendingLogprobs] = {}
        for chunk in step.prompted:
            if step.gone[chunk]:
                continue  # the step before was its last
            seq, end = step.sequences[chunk], int(ends[chunk])
            try:
                last = int(plan.starts[chunk] + plan.lengths[chunk])
                prompts[chunk] = self._prompt_logprobs(seq, last, logits[end - int(plan.num_logits[chunk]) : end])
            except Exception as error:
                self._fail([seq], "log probabilities of the prompt failed", error)
        chosen = np.flatnonzero(step.gives & ~step.gone)
        if not len(chosen):
            return _Flight(step, chosen, None, prompts)
        slots = np.full(len(logits), -1, dtype=np.int64)  # of every row of logits: -1 is nobody's
        slots[ends[chosen] - 1] = plan.slots[chosen]
        try:
            return _Flight(step, chosen, self.sampler.launch(logits, slots, self.runner.likeliest), prompts)
        except Exception as error:  # not one row's: those are in the answer
            self._raise_if_lost(plan, error)
            self._fail([step.sequences[chunk] for chunk in chosen], f"sampling failed in step {plan.step}", error)
            return _Flight(step, chosen, None, prompts)

    def _prompt_logprobs(self, seq: Sequence, end: int, logits: torch.Tensor) -> PendingLogprobs:
        """Of the prompt's tokens that follow those of `logits` [n, vocabulary], the last of which is before `end`. The
        prompt's last token has none after it."""
        token_ids = seq.tokens.view(end - len(logits) + 1, min(end + 1, seq.num_prompt))
        return prompt_logprobs(logits[: len(token_ids)], token_ids, seq.sampling.prompt_logprobs or 0)

    def _finish_flight(self) -> None:
        """Waits for the step that was launched, if there is one, and takes its tokens."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        step = flight.step
        try:
            if flight.ended is not None:
                self._send_until(flight.ended)
            sampled = None if flight.pending is None else flight.pending.result()
            prompts = {chunk: pending.result() for chunk, pending in flight.prompts.items()}
        except Exception as error:
            self._raise_if_lost(step.plan, error)
            # Nobody can say which tokens have been counted: all that get one in this step end.
            chunks = {*flight.chosen.tolist(), *flight.prompts}
            left = [step.sequences[chunk] for chunk in sorted(chunks) if not step.gone[chunk]]
            self._fail(left, f"the tokens of step {step.plan.step} were not to be had", error)
            sampled, prompts = None, {}
        self.scheduler.update(step, flight.chosen, sampled, prompts)
        self.timeline.finished(step)
        if self.scheduler.config.pp > 1:
            self._fill_stages()  # the first stage waits for these tokens, before anybody else

    def _raise_if_lost(self, plan: Plan, error: Exception) -> None:
        if isinstance(error, DeviceLost):  # in a step that was sent meanwhile
            raise error
        if isinstance(error, RankLost):
            raise DeviceLost(str(error)) from error
        if _is_lost(self.runner.device):
            raise DeviceLost(f"{self.runner.device} failed in step {plan.step} and does not answer") from error

    # ------------------------------------------------------------ slots of the sampler

    def _take_slots(self, step: Step | None) -> None:
        """Tells the sampler who left and who came in this step. One that it cannot take fails alone."""
        self._leave_slots()
        for seq in self.scheduler.running.started:
            try:
                self._take_slot(seq)
            except Exception as error:
                self._fail([seq], "the request could not be prepared", error)
        if step is not None and self.scheduler.running.vacated:
            step.withdraw()

    def _take_slot(self, seq: Sequence) -> None:
        compiled = self._awaited.get(seq.request_id)
        # One that was preempted begins anew and is led over its outputs again.
        seq.grammar = GrammarState(compiled) if compiled is not None else None
        prompt_ids = seq.tokens.view(0, seq.num_prompt).tolist()
        self.sampler.add(seq.slot, seq.sampling, prompt_ids, seq.output_ids(), self.runner.eos_token_ids, seq.grammar)

    def _leave_slots(self) -> None:
        for slot in self.scheduler.running.vacated:
            self.sampler.remove(slot)
        self.scheduler.running.vacated.clear()

    def _fail(self, sequences: Iterable[Sequence], what: str, error: Exception) -> None:
        failed = [seq.request_id for seq in sequences]
        log.error("%s: requests %s", what, ", ".join(failed), exc_info=error)
        for request_id in failed:
            self.scheduler.fail(request_id, Failure("internal", f"{what}: {in_one_line(error)}"))


@contextmanager
def heap_at_rest() -> Iterator[None]:
    """While requests run the garbage collector looks only at what came since. A model and the libraries around it are
    hundreds of thousands of objects that stay, and going through them takes longer than many steps."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_lost(device: torch.device) -> bool:
    """Whether a GPU is beyond use: after an illegal access every call fails until the process ends."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False
