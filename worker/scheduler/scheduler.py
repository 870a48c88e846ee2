"""The next step: which sequences run, with how many tokens each. Pure Python over token counts and pages: no tensors.

One rule: every sequence's `num_computed` catches up with its `num_tokens`. There is no prefill phase and no decode
phase; a decode is a sequence with one remaining token. A step is filled in this order:

1. Decodes.
2. Chunks of running sequences with more remaining tokens, while the token budget lasts.
3. Waiting sequences, while there are slots, tokens and pages. With one stage, a waiting sequence that is more urgent
   than a running prefill starts before the next chunk of that prefill.

When a step is made, and how much it may hold, is decided by a policy (`pipeline/schedule.py`). Which sequences go into
it is decided here.

When pages run out, sequences are preempted (`preemption.py`).

**Steps in flight.** The next step may be planned while the current one runs.

- The token that a sequence gets from the step in flight is pending: the token is counted and its position is planned,
  and `update` brings its value.
- A stop condition is noticed one step late. If a sequence has ended, was aborted or failed, everything planned for it
  beyond its end is dropped. With one stage, a preempted sequence keeps its pending token as an output.
- Freed pages may go to other sequences at once, because steps run in the order in which they were planned. The tree
  only gets pages that ended steps computed.

**Pipeline parallelism.** Up to `policy.most_in_flight` steps are in flight, so that no stage waits for another. What
differs from one stage is in `steps_in_flight.py`.
"""

import copy
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from pipeline.budget import Budget
from pipeline.chunk import chunk_tokens
from pipeline.policy import Policy, SchedulerView
from radix.events import Event
from radix.leases import Leases
from worker.config import WorkerConfig
from worker.drafts.speculative_decoding import SpeculativeDecoding
from worker.kv_layout import KVLayout
from worker.lengths import OutputLengthPredictor
from worker.messages import Failure, Generate, Output, ReplicaLoad, TokenLogprobs
from worker.scheduler.adapter_slots import AdapterSlots
from worker.scheduler.admission import Admission
from worker.scheduler.fair_share import FairShare
from worker.scheduler.integrity import check_sequences
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.output_queue import OutputQueue
from worker.scheduler.preemption import Preemption
from worker.scheduler.running import RunningSequences
from worker.scheduler.running_batch import RunningBatch
from worker.scheduler.scheduled_step import ScheduledStep, SchedulerOutput
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable
from worker.scheduler.step_builder import StepBuilder
from worker.scheduler.step_sizes import StepSizes
from worker.scheduler.steps_in_flight import PipelineStepsInFlight, StepsInFlight
from worker.scheduler.stop_checker import StopChecker
from worker.scheduler.validation import overloaded, refusal
from worker.scheduler.waiting_queue import QueueOrder

if TYPE_CHECKING:
    from worker.step import PooledChunks, SampledTokens

NEWEST_STARTS = 64  # number of latest starts from which the rate of starts is estimated


class Scheduler:
    """Owner of every sequence from arrival to last token, and of the pages of running sequences. Not thread-safe.

    Use: `schedule()`, run the plan of its step, `update(step, …)`, `take_outputs()`. Several steps may be in flight
    before the first `update`, as many as the policy begins. Updates come in the order of the steps.
    """

    def __init__(
        self,
        config: WorkerConfig,
        layout: KVLayout,
        *,
        vocab_size: int,
        context_length: int,
        eos_token_ids: Collection[int],
        policy: Policy,
        ahead_s: Callable[[], float] = lambda: 0.0,
        returning_s: Callable[[ScheduledStep], float] = lambda step: math.inf,
        clock: Callable[[], float] = time.monotonic,
        speculation: SpeculativeDecoding | None = None,
        lengths: OutputLengthPredictor | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Times are in seconds.

        - `layout`: the groups of the cache, as the ranks have them.
        - `ahead_s`: time until the first stage is done with all steps sent to it (`SchedulerView.ahead_s`).
        - `returning_s`: with pipeline parallelism, time until the tokens of the given step, the oldest in flight,
          are on the last stage's device for the next step to read; infinite if the next step may not read them there.
        - `clock`: the current time; a simulator passes virtual time.
        - `speculation`: proposes drafts; None for a replica without.
        - `lengths`: predicts output lengths; None for one that has learned nothing yet.
        - `on_event`: called with every change of the radix tree.
        """
        self._speculation = speculation
        self.lengths = OutputLengthPredictor() if lengths is None else lengths
        self.config = config
        self.policy = policy
        self.num_pages = layout.num_pages
        self.page_size = layout.page_size
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.kv_tokens = self.num_pages * self.page_size
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self.clock = clock
        self.counters = ReplicaLoad(incarnation="", kv_tokens_total=self.kv_tokens, page_size=self.page_size)
        self._step_sizes = StepSizes()
        # More running sequences than tokens in a step would hold pages while they wait for each other.
        num_slots = min(config.max_running, config.token_budget)
        self.running = RunningSequences(num_slots)
        self._sequences: dict[str, Sequence] = {}
        self._table = SequenceTable[Sequence](config.max_waiting + num_slots)
        self.kv_cache = KVCacheManager(layout, self._table, config.checkpoint_interval, on_event)
        self.leases = Leases(self.kv_cache.tree, self.num_pages // 2)
        self._num_stages = policy.settings.stages
        self._in_flight: StepsInFlight
        if self._num_stages == 1:
            self._in_flight = StepsInFlight(ahead_s)
            order = QueueOrder.SHORTEST_PREFILL
        else:
            self._in_flight = PipelineStepsInFlight(ahead_s, returning_s, self._table, policy)
            order = QueueOrder.LONGEST_PREFIX
        if config.scheduling_policy == "fcfs":
            order = QueueOrder.ARRIVAL
        if policy.is_for_jobs:
            order = QueueOrder.LEAST_WORK if config.finish == "most" else QueueOrder.LONGEST_OUTPUT
        self._shares = FairShare()
        self.adapters = AdapterSlots(config.lora_slots)
        places = self.kv_cache, self.adapters
        self._waiting = Admission(config, self.running, *places, self._table, order, self._shares)
        self._preemption = Preemption(self.running, self._waiting, self.kv_cache, self._in_flight)
        self._stop_checker = StopChecker(vocab_size)
        self._outputs = OutputQueue(self._table, self._stop_checker)
        self._builder: StepBuilder  # of the newest step
        self._view = SchedulerView()  # the state before the newest step
        # If the last `schedule` had a budget but no work for a step: the cause of idle time, as `Meter` names it.
        self._idle_reason: str | None = None
        # Whether more prompt tokens wait than the newest step took. A new request then misses the next step anyway.
        self.is_full = False
        self._step = 0
        self._num_arrivals = 0
        self._starts_s: deque[float] = deque(maxlen=NEWEST_STARTS)  # times of starts since the queue was last empty

    # ------------------------------------------------------------ requests come and go

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot, including those whose grammar is being compiled."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether there are sequences for `schedule`, or outputs to take."""
        return bool(self.running or self._outputs or len(self._waiting.queue))

    def add(self, request: Generate, ready: bool = True, adapter: int = 0) -> bool:
        """Accepts a request. With `ready` False, the request waits for `release` before it may run. `adapter`: number
        of its adapter, 0 for the base model.

        Returns False if nothing remains to be done: the request was refused or is complete already, and `take_outputs`
        returns its only output. Raises ValueError if the id is in use.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use: ids must be unique while a request lives")
        failure = self._refusal(request)
        if failure is not None:
            self.counters.failed += 1
            self._outputs.add_failure(request.request_id, failure)
            return False
        if not self.num_waiting:
            self._starts_s.clear()
        limit = min(len(request.prompt_ids) + request.sampling.max_tokens, self.context_length, self.kv_tokens)
        self._num_arrivals += 1
        seq = Sequence(
            request,
            self._table,
            arrival=self._num_arrivals,
            arrived_s=self.clock(),
            token_limit=limit,
            eos_token_ids=self.eos_token_ids,
            share=self._shares.open(request.client, request.user, request.weight),
            adapter=adapter,
        )
        if not seq.ends_at_limit:
            seq.length = self.lengths.arrived(request)
        if request.output_ids and self._finish_complete(seq):
            return False
        if seq.lease is not None:
            self.leases.renew(seq.lease.owner, self.clock())
        self._sequences[seq.request_id] = seq
        self._stop_checker.add(seq)
        self._waiting.add(seq, self._step, ready)
        return True

    def release(self, request_id: str) -> Sequence:
        """Lets a request that was added with `ready` False run. Returns its sequence."""
        return self._waiting.release(request_id, self._step)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Removes these requests, waiting or running, and frees their pages. Unknown ids are ignored. No output
        follows."""
        request_ids = dict.fromkeys(request_ids)
        self._outputs.discard(request_ids)
        for request_id in request_ids:
            seq = self._sequences.get(request_id)
            if seq is not None:
                self._forget(seq, keep=True)
                self.counters.aborts += 1

    def fail(self, request_id: str, failure: Failure) -> None:
        """Ends one request with `failure`. Its computed pages do not go to the tree, since they may be what failed."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._forget(seq, keep=False)
            self.counters.failed += 1
            self._outputs.add_failure(request_id, failure)

    def take_outputs(self) -> list[Output]:
        """Returns the outputs since the last call, in order."""
        return self._outputs.take_outputs()

    # ------------------------------------------------------------ a step

    def schedule(self) -> SchedulerOutput:
        """Chooses the next step: starts and preempts sequences, and allocates pages. With one stage, not while a step
        with drafts is in flight: how many tokens its sequences have is unknown."""
        assert self._num_stages > 1 or not any(step.drafts for step in self._in_flight)
        now_s = self.clock()
        self.leases.expire(now_s)
        self._shares.passes(now_s)
        running = self._classified(now_s)
        view = self._view = self._snapshot(running)
        is_too_few = view.decoding >= self._num_stages or view.waiting > 0
        budget = self.policy.begin(view)
        step = self._fill_step(budget, running)
        if budget is not None and step is None and view.decoding and view.waiting_tokens:
            # The policy may have held decodes back for prompts that got no pages.
            view.waiting = view.waiting_tokens = 0
            budget = self.policy.begin(view)
            step = self._fill_step(budget, RunningBatch.classify(self.running.rows, self._table))
        self._idle_reason = None
        if step is not None:
            self._in_flight.append(step)
            taken = step.shape.tokens - step.shape.decodes
            all_blocked = view.blocked_tokens > 0 and not view.waiting_tokens
            self.is_full = all_blocked or view.waiting_tokens - taken > taken
        elif budget is not None:
            self._idle_reason = "too_few_micro_batches" if is_too_few else "nothing_to_do"
        return SchedulerOutput(step, self.running.take_started(), self.running.take_freed_slots(), self._idle_reason)

    def _classified(self, now_s: float) -> RunningBatch:
        """The running sequences before the next step, after some have given way to other clients' sequences."""
        running = RunningBatch.classify(self.running.rows, self._table)
        giving_way = self._waiting.to_give_way(self._step, now_s, running.is_ending)
        if not giving_way:
            return running
        for seq in giving_way:
            self._preemption.give_way(seq)
        return RunningBatch.classify(self.running.rows, self._table)

    def take_freed_slots(self) -> list[int]:
        """Returns the slots that were freed since the last call, or since the last `schedule`."""
        return self.running.take_freed_slots()

    def drafts_may_follow(self) -> bool:
        """Whether the next `schedule` should come after the `update` of the newest step: because drafts are likely to
        follow its tokens."""
        if self._speculation is None:
            return False
        step = self._in_flight.newest
        rows = step.rows[step.sampled]
        rows = rows[self._table.num_tokens[rows] < self._table.token_limit[rows]]
        return self._speculation.may_follow(self._table.sequences_at(rows), step.shape)

    def ask_again_s(self) -> float:
        """Seconds after which `schedule`, which has just returned no step, may return one even if nothing else
        happens."""
        self._in_flight.look_ahead(self._view)
        return self.policy.ask_again_s(self._view, is_idle=self._idle_reason is not None)

    def update(
        self,
        step: ScheduledStep,
        chosen: np.ndarray,
        sampled: "SampledTokens | None",
        prompt_logprobs: dict[int, list[TokenLogprobs]],
        pooled: "PooledChunks | None" = None,
    ) -> None:
        """Applies the results of the oldest step in flight.

        - `chosen`: integer [n], the chunks that were sampled: those with `samples` set whose sequence had not been
          dropped when sampling was launched.
        - `sampled`: the next tokens of these chunks, in their order.
        - `prompt_logprobs`: log probabilities of prompt tokens, by chunk.
        - `pooled`: hidden states of pooled prompts, if the step computed any.

        Results of sequences that were dropped since are ignored. Sequences are found by chunk and not by slot, because
        a slot may have another owner by now.
        """
        assert self._in_flight.oldest is step, "updates come in the order of the steps"
        now_s, plan, table = self.clock(), step.plan, self._table
        is_past_prompt = plan.starts >= table.num_prompt[step.rows]
        is_decode = step.samples & is_past_prompt
        if plan.num_tokens > len(plan):
            is_single = plan.lengths == 1
            is_single[list(step.drafts)] = True
            is_decode &= is_single
        if step.has_dropped:
            is_decode &= ~step.dropped
        decodes = step.rows[is_decode]
        if len(decodes):
            self.policy.finished(now_s - float(np.minimum.reduce(table.last_output_s[decodes])))
        self._confirm(step, is_past_prompt)
        for chunk, logprobs in prompt_logprobs.items():
            known = step.sequences[chunk].prompt_logprobs
            if known is not None and not step.dropped[chunk]:
                known.extend(logprobs)
        if sampled is not None:
            self._append_tokens(step, chosen, sampled, now_s)
        if pooled is not None:
            self._add_pooled(step, pooled)
        self._in_flight.remove_oldest()

    def waiting_adapters(self) -> set[int]:
        """Adapters of waiting sequences, by number."""
        return set(self._table.adapter[self._waiting.rows].tolist()) - {0} if self.config.lora_slots else set()

    # ------------------------------------------------------------ load and integrity

    def load(self) -> ReplicaLoad:
        """The current load in tokens, and the counters. The caller sets `incarnation` and `bookings_seen`."""
        self.leases.expire(self.clock())
        load = copy.copy(self.counters)
        load.running, load.waiting = len(self.running), len(self._waiting)
        if self._speculation is not None:
            self._speculation.describe(load)
        self._step_sizes.describe(load)
        self._outputs.describe(load)
        self.kv_cache.describe(load)
        load.preemptions = self._preemption.num_preempted
        load.length_tau, load.length_ratio = self.lengths.accuracy()
        rows, waiting, table = self.running.rows, self._waiting.rows, self._table
        load.context_tokens = int(table.num_computed[rows].sum())
        both = np.concatenate([rows, waiting])
        done = np.concatenate([table.num_computed[rows], table.cached_estimate[waiting]])
        missing = np.maximum(table.num_prompt[both] - done, 0)
        load.waiting_tokens = int(missing.sum())
        load.waiting_products = int((missing * (done + missing // 2)).sum())
        load.max_loras, load.adapter_loads = self.config.lora_slots, self.adapters.num_loads
        return load

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page has one owner and every sequence is in one place. Walks all pages and
        sequences."""
        self.leases.check_integrity()
        self.adapters.check_integrity(list(self.running))
        check_sequences(self._sequences, self.running, self._waiting, self.kv_cache, self._table, self._in_flight)

    # ------------------------------------------------------------ arrival

    def _refusal(self, request: Generate) -> Failure | None:
        if self.num_waiting >= self.config.max_waiting and not request.resumed:
            return overloaded(self.num_waiting, self._starts_s, self.clock())
        return refusal(
            request,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            kv_tokens=self.kv_tokens,
            max_loras=self.config.lora_slots,
        )

    def _finish_complete(self, seq: Sequence) -> bool:
        """Ends a resumed sequence that had its last token before it arrived here. Returns whether it had."""
        output = Output(request_id=seq.request_id)
        self._stop_checker.check(seq, output)
        if output.finish_reason is None:
            return False
        self._table.remove(seq.row)
        self._shares.close(seq.share)
        self.counters.finished += 1
        self._outputs.add(output)
        return True

    # ------------------------------------------------------------ choosing sequences

    def _snapshot(self, running: RunningBatch) -> SchedulerView:
        """The state before the next step, for the policy."""
        table, queue = self._table, self._waiting.queue.rows
        view = running.view(table)
        view.free_kv = self.kv_cache.free_share
        if len(queue):
            missing = table.num_tokens[queue] - table.cached_estimate[queue]
            if not self.running.has_room or self._waiting.is_blocked(self._step):
                view.blocked_tokens = int(missing.sum())
            else:
                blocked = self._waiting.blocked(self._step)
                if len(blocked):
                    is_blocked = np.isin(table.client[queue], blocked)
                    view.blocked_tokens, missing = int(missing[is_blocked].sum()), missing[~is_blocked]
                view.waiting += len(missing)
                view.waiting_tokens += int(missing.sum())
        self._in_flight.describe(view)
        spreads = self._waiting.queue.order is QueueOrder.LONGEST_OUTPUT
        if spreads and view.waiting_tokens and not view.blocked_tokens:
            view.horizon = running.horizon(table, queue)
        return view

    def _fill_step(self, budget: Budget | None, running: RunningBatch) -> ScheduledStep | None:
        """Fills a step within the budget: decodes first, then chunks. Returns None without a budget, or if no sequence
        fits."""
        if budget is None:
            return None
        shares = self._shares if self._num_stages == 1 else None
        self._builder = StepBuilder(budget, self.kv_cache, self._table, shares)
        self._waiting.begin(self._builder, self._step)
        self._preemption.begin(self._builder, running.is_ending)
        for seq in self._sequences_at(running.rows, running.in_prompt):
            self._builder.watch(seq)
        decode, chunked = self._in_flight.schedulable(running)
        self._schedule_decodes(running.rows[decode])
        prefills = self._sequences_at(running.rows, chunked)
        if prefills or len(self._waiting.queue):
            self._schedule_chunks(prefills)
        if self._speculation is not None:
            self._schedule_drafts(self._speculation)
        if not self._builder:
            return None
        self._step += 1
        self.counters.steps = self._step
        step = self._builder.build(self._step, self._in_flight.overlapped_step)
        self._step_sizes.add(len(step.plan.token_ids))
        return step

    def _sequences_at(self, rows: np.ndarray, chosen: np.ndarray) -> list[Sequence]:
        """The `chosen` of the sequences of `rows`. Most steps have decodes alone, where none is."""
        return self._table.sequences_at(rows[chosen]) if np.count_nonzero(chosen) else []

    def _schedule_decodes(self, ready: np.ndarray) -> None:
        """Adds decodes to the step, as many as the budget takes. `ready`: int64, table rows of the sequences, by rank.

        If there may not be pages for all, sequences of earlier ranks go first: only the sequence of the first rank is
        certain to get a page.
        """
        table, budget = self._table, self._builder.budget
        decodes = self._in_flight.in_decode_order(ready)
        contexts = table.num_computed[decodes]
        taken = budget.take_decodes(contexts)
        decodes, contexts = decodes[:taken], contexts[:taken]
        short = decodes[contexts >= table.num_pages[decodes] * self.page_size]
        if len(short) <= self.kv_cache.num_growable:
            if len(short):
                self.kv_cache.allocate_each(short)
            self._builder.add_decodes(decodes)
            return
        for context in contexts.tolist():
            budget.remove(context, 1)
        for seq in table.sequences_at(ready):
            if taken and seq.is_running and self._preemption.make_room(seq, 1):
                self._builder.add(seq, 1)
                taken -= 1

    def _schedule_chunks(self, prefills: list[Sequence]) -> None:
        """Adds chunks of running sequences and of waiting ones, which start, while the budget lasts. `prefills`: the
        running sequences that need chunks, by rank."""
        prefills_left = len(prefills)
        for seq in self._in_chunk_order(prefills):
            if seq.is_running:
                prefills_left -= 1
                self._schedule_chunk(seq)
                self._waiting.running_grew()
            elif self._waiting.admit(seq):
                self._start(seq)
                self._schedule_chunk(seq)
                self._waiting.started(seq)
            elif not prefills_left and not self._waiting.is_open:
                break

    def _schedule_drafts(self, speculation: SpeculativeDecoding) -> None:
        """Adds drafts to the decodes of the step, as many as pay. Nothing is preempted for them."""
        builder, table = self._builder, self._table
        room = builder.draft_room
        if room <= 0 or not len(builder.decodes):
            return
        rows = builder.decodes
        # After the drafts comes one more token. With one stage, it pays to wait for a pending token (`may_follow`).
        rows = rows[table.num_tokens[rows] + 1 < table.token_limit[rows]]
        rows = rows[table.num_pending[rows] <= (self._num_stages > 1)]
        if not len(rows):
            return
        candidates = table.sequences_at(rows)
        drafted: dict[Sequence, list[int]] = {}
        chosen = speculation.choose(candidates, builder.budget.shape, room, self._preemption.make_room)
        for i, drafts in chosen.items():
            seq = candidates[i]
            fitting = self._preemption.make_room(seq, 1 + len(drafts)) - 1
            if fitting > 0:
                drafted[seq] = drafts[:fitting]
        if drafted:
            builder.add_drafts(drafted)

    def _in_chunk_order(self, prefills: list[Sequence]) -> Iterator[Sequence]:
        """Running prefills and waiting sequences, in the order in which they may have chunks: clients in turn, and of
        each client running ones first, or all by urgency, so that short prompts overtake a long one."""
        queue, now_s = self._waiting.queue, self.clock()
        waiting = self._waiting.candidates(now_s)

        def merged(prefills: list[Sequence], waiting: list[Sequence]) -> Iterator[Sequence]:
            if queue.order is not QueueOrder.SHORTEST_PREFILL:
                yield from prefills
                yield from waiting
                return
            prefills = queue.by_urgency(prefills, now_s)
            for seq in waiting:
                while prefills and queue.is_before(prefills[0], seq, now_s):
                    yield prefills.pop(0)
                yield seq
            yield from prefills

        if not (queue.is_fair and self._shares.is_contended):
            return merged(prefills, waiting)
        favoured = self._waiting.favoured
        if favoured is None:
            return queue.in_turn(prefills, waiting, merged, self._builder.__contains__)
        others = [seq for seq in waiting if seq is not favoured]
        in_turn = queue.in_turn(prefills, others, merged, self._builder.__contains__)
        return itertools.chain((favoured,), in_turn)

    def _schedule_chunk(self, seq: Sequence) -> None:
        """Adds the next chunk of a running sequence to the step, unless there are no tokens or pages for it now."""
        limit = self._builder.limit(seq)
        if limit <= 0:
            return
        size = chunk_tokens(seq.num_missing, limit, self._preemption.make_room(seq, limit))
        if size > 0:
            self._builder.add(seq, size)
            self._shares.computes(seq.share, size)

    def _start(self, seq: Sequence) -> None:
        """Gives a sequence a slot, and counts its first start."""
        self.running.add(seq)
        if seq.started_s is None:
            seq.started_s = self.clock()
            self._starts_s.append(seq.started_s)
            seq.cached_tokens = min(seq.num_computed, seq.num_prompt)
            self._shares.charge(seq.share, seq.num_tokens - seq.num_computed)
            self.counters.prompt_tokens += seq.num_prompt
            self.counters.cached_tokens += seq.cached_tokens
        self._builder.watch(seq)

    # ------------------------------------------------------------ results

    def _forget(self, seq: Sequence, keep: bool) -> None:
        """Removes a sequence, waiting or running. Its chunks in flight are dropped. `keep`: its computed pages go to
        the tree."""
        del self._sequences[seq.request_id]
        self._stop_checker.remove(seq)
        if seq.is_running:
            if keep and seq.lease is not None:
                node = self.kv_cache.cache_prefix(seq)
                lease, client = seq.lease, seq.share.tenant.name
                self.leases.grant(lease.owner, lease.name, node, lease.seconds, self.clock(), client)
            self._preemption.release(seq, keep)
        else:
            self._waiting.remove(seq)
        self._in_flight.drop(seq)
        self._table.remove(seq.row)
        self._shares.close(seq.share)

    def _confirm(self, step: ScheduledStep, is_past_prompt: np.ndarray) -> None:
        """Marks the tokens of a step's chunks as confirmed. Whole pages of prompts go to the tree, and those before
        resume points that the step has copied parts of. Sequences give back what they need no longer. `is_past_prompt`:
        bool [chunks], whether a chunk starts after its sequence's prompt."""
        table, plan = self._table, step.plan
        is_kept = table.slot[step.rows] >= 0  # without preempted sequences
        if step.has_dropped:
            is_kept &= ~step.dropped
        ends = plan.starts + plan.lengths
        if step.drafts:  # which drafts are right is not known here
            drafted = list(step.drafts)
            ends[drafted] = plan.starts[drafted] + 1
        kept = step.rows[is_kept]
        table.num_confirmed[kept] = ends[is_kept]
        is_cached = is_kept & ~is_past_prompt
        if len(plan.copies):
            is_cached[plan.copies[:, 0]] = is_kept[plan.copies[:, 0]]
        for chunk in is_cached.nonzero()[0].tolist():
            self.kv_cache.cache_prefix(step.sequences[chunk])
        self.kv_cache.give_back(kept)

    def _append_tokens(self, step: ScheduledStep, chosen: np.ndarray, sampled: "SampledTokens", now_s: float) -> None:
        """Appends the tokens of a step to its sequences, and removes the sequences that failed or ended."""
        for i, failure in sampled.failures.items():
            if not step.dropped[chosen[i]]:
                self.fail(step.sequences[chosen[i]].request_id, failure)
        if self._speculation is not None and step.drafts:
            for i, chunk in enumerate(chosen.tolist()):
                if chunk in step.drafts and not step.dropped[chunk]:
                    seq, start = step.sequences[chunk], int(step.plan.starts[chunk])
                    accepted = len(sampled.following.get(i, ()))
                    self._speculation.verified(seq, start, len(step.drafts[chunk]), accepted)
        if self._shares.counts:
            rows = step.rows[chosen[~step.dropped[chosen]] if step.has_dropped else chosen]
            self._shares.charge_outputs(self._table.client[rows])
        for seq in self._outputs.add_tokens(step, chosen, sampled, now_s):
            self._waiting.kv_demand.end(seq)
            if seq.length is not None:
                produced = seq.num_known - seq.num_prompt
                self.lengths.ended(seq.length, produced, was_cut=seq.num_known >= seq.token_limit)
                self._waiting.predict_again(self.lengths)
            self._forget(seq, keep=True)
            self.counters.finished += 1

    def _add_pooled(self, step: ScheduledStep, pooled: "PooledChunks") -> None:
        """Adds the hidden states of a step to the embeddings of its sequences, and removes the sequences whose
        embedding is complete."""
        plan = step.plan
        for chunk, total in zip(pooled.chunks, pooled.sums, strict=True):
            seq, start = step.sequences[chunk], int(plan.starts[chunk])
            if step.dropped[chunk] or seq.pool is None:
                continue
            embedding = seq.pool.add(start, start + int(plan.lengths[chunk]), total)
            if embedding is None:
                continue
            if not np.isfinite(embedding).all():
                self.fail(seq.request_id, Failure("internal", "the model's output is not a number"))
                continue
            self._outputs.add_embedding(seq, embedding)
            self._forget(seq, keep=True)
            self.counters.finished += 1
