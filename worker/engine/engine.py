"""A replica without its socket: scheduler, executor, sampler and grammars, and the loop that runs steps on them.

`worker.engine.steps` has the parts of a step, and `worker.engine.loops` the three orders in which they run: serial,
overlapped, and pipelined. Which loop runs is decided once, in `Engine.__init__`.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.meter import Meter
from radix.events import Event
from radix.snapshot import SnapshotWalk
from worker.config import WorkerConfig
from worker.drafts import Drafter, SpeculativeDecoding, make_drafters
from worker.drafts.model import ModelDrafter
from worker.engine.adapter_queue import AdapterQueue
from worker.engine.cost_store import ENDS_S, CostStore, needs_costs
from worker.engine.loops import OverlapLoop, PipelineLoop, SerialLoop, StepLoop
from worker.engine.readiness import Readiness
from worker.engine.stage_timeline import StageTimeline
from worker.engine.step_watch import StepWatch
from worker.engine.steps import Steps
from worker.executor.draft_model import DraftModel
from worker.executor.executor import Executor
from worker.executor.gpu_defaults import with_gpu_defaults
from worker.executor.launch import open_executor
from worker.lengths import LengthStore
from worker.messages import Adapter, Failure, Generate, Output, ReplicaLoad, SamplingParams, TokenLogprobs
from worker.models.draft_vocabulary import check_draft_model
from worker.sampling.sampler import Sampler
from worker.scheduler.scheduler import Scheduler
from worker.structured_output import AnswerChecks, GrammarCompiler, GrammarQueue

log = logging.getLogger(__name__)

STEP_TIMES_TIMEOUT_S = 2.0  # longest time that a stage's step times may take to arrive


class Components(NamedTuple):
    """The parts of an engine that are loaded: everything but the scheduler and the radix tree."""

    executor: Executor
    sampler: Sampler
    grammars: GrammarCompiler
    costs: CostStore = CostStore()
    drafters: Sequence[Drafter] = ()
    draft_model: DraftModel | None = None
    lengths: LengthStore | None = None


def load_components(
    model_dir: Path,
    config: WorkerConfig,
    make_executor: Callable[[Path, WorkerConfig], Executor] = open_executor,
    cost_folder: Path | None = None,
    length_folder: Path | None = None,
    grammar_folder: Path | None = None,
) -> Components:
    """Loads the model of a folder. What steps cost is learned, where it matters, and kept in `cost_folder`; what is
    learned of output lengths in `length_folder`. Compiled grammars are kept in `grammar_folder`. Raises whatever the
    model's files or the device have to complain about."""
    if config.draft_model is not None:
        check_draft_model(Path(config.draft_model), model_dir)
    executor = make_executor(model_dir, config)
    sampler = Sampler(config.max_running, executor.vocab_size, executor.device, executor.last_tokens)
    grammars = GrammarCompiler(
        model_dir, executor.vocab_size, config.grammar_timeout_s, executor.eos_token_ids, folder=grammar_folder
    )
    costs = CostStore()
    if needs_costs(config):
        costs = CostStore.load(model_dir, config, executor.device, cost_folder)
    drafters, draft_model = list[Drafter](), None
    if config.speculates:
        drafters = make_drafters(model_dir, executor.vocab_size, grammar=config.jump_forward != "off")
    if config.draft_model is not None:
        draft_model = DraftModel(Path(config.draft_model), config, executor)
        passes = CostStore.load(Path(config.draft_model), draft_model.config, executor.device)
        drafters.append(ModelDrafter(draft_model, passes))
    lengths = LengthStore.load(model_dir, length_folder)
    return Components(executor, sampler, grammars, costs, drafters, draft_model, lengths)


@dataclass
class Finished:
    """The result of one prompt of `Engine.generate`. `token_ids` are the output tokens, a stop token included;
    `embedding` is that of a pooled prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str = ""
    failure: Failure | None = None
    cached_tokens: int = 0
    embedding: bytes | None = None

    def add(self, output: Output) -> None:
        """Adds an output of the prompt."""
        self.token_ids += output.token_ids
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.failure = output.failure
            self.embedding = output.embedding


class Engine:
    """Runs requests. One thread at a time; only `on_ready` is called from another."""

    def __init__(
        self,
        model_dir: Path,
        config: WorkerConfig,
        *,
        on_event: Callable[[Event], None] | None = None,
        on_ready: Callable[[], None] | None = None,
        load: Callable[[Path, WorkerConfig], Components] = load_components,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_event` is called with every change of the radix tree. `on_ready` is called, from any thread, when a
        request wants a `step`: its grammar has compiled, or its answer has been judged. `load` makes the components."""
        config = with_gpu_defaults(config, Path(model_dir))
        parts = load(Path(model_dir), config)
        self.executor, self.sampler, self.grammars, self.costs, drafters, self._draft_model, lengths = parts
        self._lengths = LengthStore() if lengths is None else lengths
        overlap = self.executor.device.type != "cpu" if config.overlap is None else config.overlap
        self.timeline = StageTimeline(config.pp, self.costs)
        self.watch = StepWatch(self.costs, config.longest_step_s, self.executor.device.type)
        speculation = None
        if drafters:
            exposed_s = ENDS_S if overlap and config.pp == 1 else 0.0
            most, rows = config.num_speculative_tokens, self.costs.rows
            speculation = SpeculativeDecoding(drafters, self.costs.seconds, most, exposed_s, rows=rows)
        self.scheduler = Scheduler(
            config,
            self.executor.layout,
            vocab_size=self.executor.vocab_size,
            context_length=self.executor.context_length,
            eos_token_ids=self.executor.eos_token_ids,
            policy=self.costs.policy(config, overlap),
            ahead_s=lambda: self._loop.ahead_s(),
            returning_s=lambda step: self._loop.returning_s(step),
            clock=clock,
            speculation=speculation,
            lengths=self._lengths.predictor,
            on_event=on_event,
        )
        self.tree = self.scheduler.kv_cache.tree
        self._grammar_queue = GrammarQueue(self.grammars, on_ready)
        self._answer_checks = AnswerChecks(self.grammars, on_ready)
        self._adapter_queue = AdapterQueue(self.executor, config.max_cpu_loras, on_ready)
        self.readiness = Readiness({"grammar": self._grammar_queue, "adapter": self._adapter_queue})
        self._steps = Steps(
            self.scheduler,
            self.executor,
            self.sampler,
            self.timeline,
            self.watch,
            self._grammar_queue,
            speculation,
        )
        self._loop: StepLoop
        if config.pp > 1:
            self._loop = PipelineLoop(self._steps, overlap)
        else:
            self._loop = OverlapLoop(self._steps) if overlap else SerialLoop(self._steps)

    # ------------------------------------------------------------ requests

    def add(self, request: Generate) -> None:
        """Takes a request; what becomes of it comes out of `step`. Raises ValueError for an id that is in use."""
        request_id, grammar = request.request_id, request.sampling.grammar
        if request_id in self.scheduler:
            raise ValueError(f"request id {request_id!r} is in use: ids must be unique while a request lives")
        number, missing = 0, [] if grammar is None else ["grammar"]
        if request.adapter is not None and self.scheduler.config.lora_slots:
            number, is_there = self._adapter_queue.open(request_id, request.adapter)
            missing += [] if is_there else ["adapter"]
        if not self.scheduler.add(request, ready=not missing, adapter=number):
            self.readiness.forget(request_id)
            return
        self.readiness.wait_for(request_id, missing)
        if grammar is not None:
            self._grammar_queue.submit(request_id, grammar, request.client)
            self._answer_checks.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets these requests and frees their pages at once. Unknown ids are ignored. No output follows."""
        request_ids = list(request_ids)
        self.scheduler.abort(request_ids)
        for request_id in request_ids:
            self.readiness.forget(request_id)
            self._answer_checks.forget(request_id)
        self._steps.free_sampler_slots(self.scheduler.take_freed_slots())

    def release(self, owners: Iterable[str]) -> None:
        """Ends all leases of these owners. Unknown ones are ignored."""
        self.scheduler.leases.release(owners)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do now. Requests that are not ready, or wait to be judged by their schema, do
        not count: `on_ready` tells."""
        is_ready = self.readiness.has_ready or self._answer_checks.has_ready
        return self.scheduler.has_work or self._loop.has_work or is_ready

    def spare_s(self) -> float:
        """Seconds for which the next `step` may be put off, because the device is busy until then."""
        return self._loop.spare_s()

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Runs one turn of the loop. Returns the outputs since the last call. Raises DeviceLost."""
        for request_id, failure in self.readiness.poll():
            if failure is not None:
                self.scheduler.fail(request_id, failure)
            elif request_id in self.scheduler:
                self.scheduler.release(request_id)
        self._steps.record_times()
        self._loop.turn()
        outputs = self.scheduler.take_outputs()
        if len(self._answer_checks) or self._answer_checks.has_ready:  # a verdict may come after its request has gone
            outputs = list(self._answer_checks.pass_on(outputs, self._grammar_queue.compiled))
        if not self.has_work:
            self._rest()
        self._steps.free_sampler_slots(self.scheduler.take_freed_slots())
        if len(self.readiness):
            for output in outputs:
                if output.finish_reason is not None:
                    self.readiness.forget(output.request_id)
        return outputs

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | list[SamplingParams],
        progress: Callable[[int], None] | None = None,
        predictions: Sequence[list[int]] | None = None,
        adapters: Sequence[Adapter | None] | None = None,
    ) -> list[Finished]:
        """Runs prompts to their end, without a server. `sampling`: one for all prompts, or one for each. `progress` is
        called after every step with the number of finished prompts. `predictions`: a guess at the output of each.
        `adapters`: the adapter of each.
        Returns the results in the order of `prompts`; a prompt that could not run has a `failure`."""
        each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        finished = {f"prompt-{i}": Finished() for i in range(len(prompts))}
        guesses, own = predictions or [[] for _ in prompts], adapters or [None for _ in prompts]
        arrivals = zip(finished, prompts, each, guesses, own, strict=True)
        num_done = 0
        with frozen_heap():
            try:
                while num_done < len(prompts):
                    # Preempted sequences wait too, and may exceed `max_waiting`.
                    room = max(0, self.scheduler.config.max_waiting - self.scheduler.num_waiting)
                    for name, prompt, params, guess, adapter in islice(arrivals, room):
                        request = Generate(request_id=name, prompt_ids=prompt, sampling=params, adapter=adapter)
                        request.prediction_ids = list(guess)
                        self.add(request)
                    if not self.has_work:
                        self.readiness.wait(self._answer_checks.futures)
                    for output in self.step():
                        finished[output.request_id].add(output)
                        num_done += output.finish_reason is not None
                    if progress is not None:
                        progress(num_done)
            finally:  # nothing goes on after an interrupt
                self.abort(name for name, result in finished.items() if not result.finish_reason)
        return list(finished.values())

    # ------------------------------------------------------------ what is there

    def load(self) -> ReplicaLoad:
        """The replica's load. The caller fills in `incarnation` and `bookings_seen`."""
        load = self.scheduler.load()
        load.stage_seconds = self.timeline.spent()
        load.adapters_resident = self._adapter_queue.names(self.scheduler.adapters.resident)
        load.adapters_running = self._adapter_queue.names(self.scheduler.adapters.in_use)
        load.adapters_waiting = self._adapter_queue.names(self.scheduler.waiting_adapters())
        load.costs = self.costs.step_costs(self.scheduler.config)
        if (balance := self.executor.expert_balance) is not None:
            load.expert_tokens, load.expert_imbalance = balance.tokens, balance.imbalance
        return load

    def meter(self) -> Meter:
        """Where the stages' time went. To be called while nothing runs. Waits for the stages' times, up to
        STEP_TIMES_TIMEOUT_S."""
        deadline_s = time.monotonic() + STEP_TIMES_TIMEOUT_S
        self._steps.record_times()
        while self.timeline.meter.under_way and time.monotonic() < deadline_s:
            time.sleep(0.001)
            self._steps.record_times()
        return self.timeline.meter

    def trace(self) -> str:
        """The newest steps on all stages, as JSON that Perfetto opens (https://ui.perfetto.dev)."""
        self._steps.record_times()
        return self.timeline.meter.trace_json()

    def walk(self) -> SnapshotWalk:
        """A way through the tree, to tell it to a new listener in pieces."""
        return self.tree.snapshot_walk()

    def flush_cache(self) -> None:
        """Forgets every cached prefix that no running request holds."""
        self.tree.evict(self.tree.num_evictable)

    def reset_cache(self) -> None:
        """Forgets every cached prefix. Raises ValueError while a request runs."""
        self.tree.reset()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, slot and sequence is where it belongs. Walks everything."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Ends the compiler's thread and the other ranks. The engine is of no use afterwards."""
        self.costs.save()
        self._lengths.save()
        self.grammars.close()
        if self._draft_model is not None:
            self._draft_model.close()
        self.executor.close()

    def _rest(self) -> None:
        """Records that there is nothing to do."""
        self._steps.record_times()
        self.timeline.nothing("nothing_to_do")
        self.costs.save_if_due()
        self._lengths.save_if_due()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Hides objects that exist now from the garbage collector, while requests run. A model and its libraries are
    hundreds of thousands of objects that stay, and a full collection over them takes longer than many steps."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
