"""The next step: which sequences run, with how many tokens each. Pure Python over token counts and pages: no tensors.

One rule: every sequence's `num_computed` catches up with its `num_tokens`. There is no prefill phase and no decode
phase; a decode is a sequence with one remaining token. A step is filled in this order:

1. Decodes.
2. Chunks of running sequences with more remaining tokens, while the token budget lasts.
3. Waiting sequences, while there are slots, tokens and pages. With one stage, a waiting sequence that is more urgent
   than a running prefill starts before the next chunk of that prefill.

When a step is made, and how much it may hold, is decided by a policy (`pipeline/schedule.py`). Which sequences go into
it is decided here.

**Preemption.** When pages run out, cached pages are evicted first. Then the running sequence of the last rank (lowest
priority, latest arrival) is preempted. Its computed pages go to the tree. It waits at the front of its priority, and
resumes from the pages that are still cached. There is no deadlock: the sequence of the first rank can take every page
in this way, and no sequence is accepted that needs more than all pages.

**Steps in flight.** The next step may be planned while the current one runs.

- The token that a sequence gets from the step in flight is pending: the token is counted and its position is planned,
  and `update` brings its value.
- A stop condition is noticed one step late. If a sequence has ended, was aborted or failed, everything planned for it
  beyond its end is dropped. With one stage, a preempted sequence keeps its pending token as an output.
- Freed pages may go to other sequences at once, because steps run in the order in which they were planned. The tree
  only gets pages that ended steps computed.

**Pipeline parallelism.** Up to `policy.most_in_flight` steps are in flight, so that no stage waits for another.

- Prefill: the next chunk of a sequence may be in the very next step (`policy.chunks_follow`).
- Decode: a sequence waits for its token before its next decode. The exception is the oldest step when it is about to
  end (`policy.may_overlap_oldest`): its tokens are then `PENDING` in the next plan, and go from the last stage to the
  first one from GPU to GPU.
- Preemption: the token in flight is discarded, because its slot may belong to another sequence when it is sampled. It
  is sampled again later with the same seed and position.
"""

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from pipeline.budget import Budget
from pipeline.chunk import chunk_tokens
from pipeline.policy import Policy, SchedulerView
from radix.tree import Tree
from worker.config import WorkerConfig
from worker.messages import Failure, Generate, Output, ReplicaLoad, TokenLogprobs
from worker.scheduler.admission import Admission
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.running import RunningSequences
from worker.scheduler.running_batch import RunningBatch
from worker.scheduler.scheduled_step import ScheduledStep, SchedulerOutput
from worker.scheduler.sequence import Sequence, pages_for
from worker.scheduler.sequence_table import SequenceTable
from worker.scheduler.step_builder import StepBuilder
from worker.scheduler.stop_checker import StopChecker
from worker.scheduler.validation import overloaded, refusal

if TYPE_CHECKING:
    from worker.step import SampledTokens

STARTS = 64  # number of latest starts from which the rate of starts is estimated


class Scheduler:
    """Owner of every sequence from arrival to last token, and of the pages of running sequences. Not thread-safe.

    Use: `schedule()`, run the plan of its step, `update(step, …)`, `take_outputs()`. Several steps may be in flight
    before the first `update`, as many as the policy begins. Updates come in the order of the steps.
    """

    def __init__(
        self,
        config: WorkerConfig,
        tree: Tree,
        *,
        vocab_size: int,
        context_length: int,
        eos_token_ids: Collection[int],
        policy: Policy,
        ahead_s: Callable[[], float] = lambda: 0.0,
        returning_s: Callable[[ScheduledStep], float] = lambda step: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Times are in seconds.

        - `ahead_s`: time until the first stage is done with all steps sent to it (`SchedulerView.ahead_s`).
        - `returning_s`: with pipeline parallelism, time until the tokens of the given step, the oldest in flight,
          are on the last stage's device for the next step to read; infinite if the next step may not read them there.
        - `clock`: the current time; a simulator passes virtual time.
        """
        self.config = config
        self.policy = policy
        self._ahead_s, self._returning_s = ahead_s, returning_s
        self.kv_cache = KVCacheManager(tree)
        self.num_pages = tree.pool.num_pages
        self.page_size = tree.page_size
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.kv_tokens = self.num_pages * self.page_size
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self.clock = clock
        self.counters = ReplicaLoad(incarnation="", kv_tokens_total=self.kv_tokens)
        # More running sequences than tokens in a step would hold pages while they wait for each other.
        num_slots = min(config.max_running, config.token_budget)
        self.running = RunningSequences(num_slots)
        self._sequences: dict[str, Sequence] = {}
        self._table = SequenceTable[Sequence](config.max_waiting + num_slots)
        self._waiting = Admission(config, self.kv_cache, self._table, clock, policy.longest_first)
        self._stop_checker = StopChecker(vocab_size)
        self._outputs: list[Output] = []
        self._builder = StepBuilder(Budget(0), self.page_size, self._table)  # of the newest step
        self._view = SchedulerView()  # the state before the newest step
        self._returning: ScheduledStep | None = None  # the oldest step, if the policy overlaps it with the next one
        self._in_flight: deque[ScheduledStep] = deque()  # steps before their `update`, oldest first
        # If the last `schedule` had a budget but no work for a step: the cause of idle time, as `Meter` names it.
        self._idle_reason: str | None = None
        self._ending = False  # whether a running sequence ends with a step in flight
        # Whether more prompt tokens wait than the newest step took. A new request then misses the next step anyway.
        self.is_full = False
        self._step = 0
        self._num_arrivals = 0
        self._starts_s: deque[float] = deque(maxlen=STARTS)  # times of starts since the queue was last empty

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

    def add(self, request: Generate, ready: bool = True) -> bool:
        """Accepts a request. With `ready` False, the request waits for `release` before it may run.

        Returns False if nothing remains to be done: the request was refused or is complete already, and `take_outputs`
        returns its only output. Raises ValueError if the id is in use.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use: ids must be unique while a request lives")
        failure = self._refusal(request)
        if failure is not None:
            self.counters.failed += 1
            self._outputs.append(Output(request_id=request.request_id, finish_reason="error", failure=failure))
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
        )
        if request.output_ids and self._finish_complete(seq):
            return False
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
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]
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
            self._outputs.append(Output(request_id=request_id, finish_reason="error", failure=failure))

    def take_outputs(self) -> list[Output]:
        """Returns the outputs since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ------------------------------------------------------------ a step

    def schedule(self) -> SchedulerOutput:
        """Chooses the next step: starts and preempts sequences, and allocates pages."""
        running = RunningBatch.classify(self.running.rows, self._table)
        view = self._view = self._snapshot(running)
        is_too_few = view.decoding >= self.config.pp or view.waiting > 0
        budget = self.policy.begin(view)
        step = self._build(budget, running)
        if budget is not None and step is None and view.decoding and view.waiting_tokens:
            # The policy may have held decodes back for prompts that got no pages.
            view.waiting = view.waiting_tokens = 0
            budget = self.policy.begin(view)
            step = self._build(budget, RunningBatch.classify(self.running.rows, self._table))
        self._idle_reason = None
        if step is not None:
            self._in_flight.append(step)
            taken = step.shape.tokens - step.shape.decodes
            self.is_full = view.blocked_tokens > 0 or view.waiting_tokens - taken > taken
        elif budget is not None:
            self._idle_reason = "too_few_micro_batches" if is_too_few else "nothing_to_do"
        return SchedulerOutput(step, self.running.take_started(), self.running.take_freed_slots(), self._idle_reason)

    def take_freed_slots(self) -> list[int]:
        """Returns the slots that were freed since the last call, or since the last `schedule`."""
        return self.running.take_freed_slots()

    def ask_again_s(self) -> float:
        """Seconds after which `schedule`, which has just returned no step, may return one even if nothing else
        happens."""
        self._look_ahead(self._view)
        return self.policy.ask_again_s(self._view, is_idle=self._idle_reason is not None)

    def _build(self, budget: Budget | None, running: RunningBatch) -> ScheduledStep | None:
        """Builds a step within the budget. Returns None without a budget, or if no sequence fits."""
        if budget is None:
            return None
        self._ending = running.is_ending
        self._builder = StepBuilder(budget, self.page_size, self._table)
        preemptions = self.counters.preemptions
        lets_pass = self.config.pp == 1 and not self.policy.longest_first
        others = self._schedule_running(running)
        for seq in self._in_order(others) if lets_pass else others:
            # Pages that a preemption has just freed are for running sequences.
            if lets_pass and len(self._waiting.queue) and self.counters.preemptions == preemptions:
                self._admit(before=seq)
            self._schedule_chunk(seq)
        if len(self._waiting.queue) and self.counters.preemptions == preemptions:
            self._admit()
        if not self._builder:
            return None
        self._step += 1
        self.counters.steps = self._step
        return self._builder.build(self._step, None if self._returning is None else self._returning.plan.step)

    def update(
        self,
        step: ScheduledStep,
        chosen: np.ndarray,
        sampled: "SampledTokens | None",
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> None:
        """Applies the results of the oldest step in flight.

        - `chosen`: integer [n], the chunks that were sampled: those with `samples` set whose sequence had not been
          dropped when sampling was launched.
        - `sampled`: the next tokens of these chunks, in their order.
        - `prompt_logprobs`: log probabilities of prompt tokens, by chunk.

        Results of sequences that were dropped since are ignored. Sequences are found by chunk and not by slot, because
        a slot may have another owner by now.
        """
        assert self._in_flight[0] is step, "updates come in the order of the steps"
        now_s = self.clock()
        is_decode = step.samples & (step.plan.lengths == 1) & (step.plan.starts >= self._table.prompt[step.rows])
        decodes = step.rows[is_decode & ~step.dropped]
        if len(decodes):
            self.policy.finished(now_s - float(self._table.answered_s[decodes].min()))
        self._confirm(step)
        for chunk, logprobs in prompt_logprobs.items():
            known = step.sequences[chunk].prompt_logprobs
            if known is not None and not step.dropped[chunk]:
                known.extend(logprobs)
        if sampled is not None:
            self._append_tokens(step, chosen, sampled, now_s)
        self._in_flight.popleft()

    # ------------------------------------------------------------ load and integrity

    def load(self) -> ReplicaLoad:
        """The current load in tokens, and the counters. The caller sets `incarnation` and `bookings_seen`."""
        load = copy.copy(self.counters)
        load.running = len(self.running)
        load.waiting = len(self._waiting)
        rows, waiting, counts = self.running.rows, self._waiting.rows, self._table
        load.context_tokens = int(counts.computed[rows].sum())
        load.waiting_tokens = int(np.maximum(counts.prompt[rows] - counts.computed[rows], 0).sum())
        load.waiting_tokens += int(np.maximum(counts.prompt[waiting] - counts.cached[waiting], 0).sum())
        load.kv_tokens_cached = self.kv_cache.tree.num_evictable * self.page_size
        load.kv_tokens_used = self.kv_tokens - self.kv_cache.num_available * self.page_size
        return load

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page has one owner and every sequence is in one place. Walks all pages and
        sequences."""
        self.running.check_integrity()
        self.kv_cache.check_integrity(self.running)
        waiting = list(self._waiting)
        places = [*self.running, *waiting]
        assert len(places) == len(self._sequences), "a sequence is nowhere, or in two places"
        assert all(self._sequences[seq.request_id] is seq for seq in places)
        for seq in self.running:
            assert seq.num_computed <= seq.pages.size * self.page_size, "tokens without a page"
            assert seq.num_confirmed <= min(seq.num_computed, seq.num_known)
            assert seq.num_pending <= len(self._in_flight)
        for seq in waiting:
            assert seq.slot == -1 and seq.pages.size == 0 and seq.node is None, "a waiting sequence holds pages"
        self._table.check_integrity(places)
        for seq in places:
            assert (seq.num_known, seq.num_pages) == (seq.tokens.size, seq.pages.size), "counted wrongly"

    # ------------------------------------------------------------ arrival

    def _refusal(self, request: Generate) -> Failure | None:
        if self.num_waiting >= self.config.max_waiting and not request.resumed:
            return overloaded(self.num_waiting, self._starts_s, self.clock())
        return refusal(
            request, vocab_size=self.vocab_size, context_length=self.context_length, kv_tokens=self.kv_tokens
        )

    def _finish_complete(self, seq: Sequence) -> bool:
        """Ends a resumed sequence that had its last token before it arrived here. Returns whether it had."""
        output = Output(request_id=seq.request_id)
        self._stop_checker.check(seq, output)
        if output.finish_reason is None:
            return False
        self._table.remove(seq.row)
        self.counters.finished += 1
        self._outputs.append(output)
        return True

    # ------------------------------------------------------------ choosing sequences

    def _snapshot(self, running: RunningBatch) -> SchedulerView:
        """The view for the policy. Also decides whether the next step overlaps the oldest one (`_returning`)."""
        counts, queue = self._table, self._waiting.queue.rows
        view = running.view(counts)
        view.free_kv = self.kv_cache.num_available / self.num_pages
        if len(queue):
            queued = int((counts.tokens[queue] - counts.cached[queue]).sum())
            if not self.running.has_room or self._waiting.is_blocked(self._step):
                view.blocked_tokens = queued
            else:
                view.waiting += len(queue)
                view.waiting_tokens += queued
        view.in_flight = [step.shape for step in self._in_flight]
        self._returning = None
        self._look_ahead(view)
        if self._in_flight and self.policy.may_overlap_oldest(view):
            self._returning = self._in_flight[0]
            view.in_flight = view.in_flight[1:]
        if self.policy.longest_first and view.waiting_tokens and not view.blocked_tokens:
            view.horizon = running.horizon(counts, queue)
        return view

    def _look_ahead(self, view: SchedulerView) -> None:
        """Sets the predicted times of the view."""
        view.ahead_s = self._ahead_s()
        is_away = self.config.pp > 1 and self._in_flight and self._returning is None
        view.returning_s = self._returning_s(self._in_flight[0]) if is_away else math.inf

    def _schedule_running(self, running: RunningBatch) -> list[Sequence]:
        """Adds decodes of running sequences to the step, as many as the budget takes. Returns the running sequences
        that need other chunks, by rank; the caller adds these one by one."""
        rows, counts = running.rows, self._table
        decode, going = running.decode, running.going
        if self.config.pp > 1:
            is_known = counts.pending[rows] == 0
            if (back := self._returning) is not None:
                is_known |= (counts.pending[rows] == 1) & np.isin(rows, back.rows[back.samples & ~back.dropped])
            decode, going = decode & is_known, going & is_known
            if not self.policy.chunks_follow:
                going &= counts.confirmed[rows] == running.computed
        if np.count_nonzero(running.in_prompt):
            for seq in counts.sequences_at(rows[running.in_prompt]):
                self._builder.watch(seq)
        others = counts.sequences_at(rows[going]) if np.count_nonzero(going) else []
        self._schedule_decodes(rows[decode])
        return others

    def _schedule_decodes(self, ready: np.ndarray) -> None:
        """Adds decodes to the step, as many as the budget takes. `ready`: int64, table rows of the sequences, by rank.

        With pipeline parallelism, sequences whose last token came first go first. If there may not be pages for all,
        the order is by rank instead: only the sequence of the first rank is certain to get a page.
        """
        counts, budget = self._table, self._builder.budget
        decodes = ready
        if self.config.pp > 1:
            since_s = np.where(counts.pending[ready] > 0, math.inf, counts.answered_s[ready])
            decodes = ready[np.argsort(since_s, kind="stable")]
        contexts = counts.computed[decodes]
        taken = budget.take_decodes(contexts)
        decodes, contexts = decodes[:taken], contexts[:taken]
        short = decodes[contexts >= counts.pages[decodes] * self.page_size]
        if len(short) <= self.kv_cache.num_available:
            if len(short):
                self.kv_cache.allocate_each(counts.sequences_at(short))
            self._builder.add_decodes(decodes)
            return
        for context in contexts.tolist():
            budget.remove(context, 1)
        for seq in counts.sequences_at(ready):
            if taken and seq.is_running and self._make_room(seq, 1):
                self._builder.add(seq, 1)
                taken -= 1

    def _schedule_chunk(self, seq: Sequence) -> None:
        """Adds the next chunk of a running sequence to the step, unless there are no tokens or pages for it now."""
        if seq.slot < 0:
            return  # preempted by a sequence of an earlier rank
        limit = self._builder.limit(seq)
        size = chunk_tokens(seq.num_missing, limit, self._make_room(seq, limit)) if limit > 0 else 0
        if size > 0:
            self._builder.add(seq, size)

    def _make_room(self, seq: Sequence, tokens: int) -> int:
        """Allocates pages for `tokens` more tokens of a running sequence, or for as many as there are pages.

        Returns the number of tokens that fit now.

        Sequences of later ranks are preempted only if not even one token fits, and only if no sequence is about to free
        its pages by ending with the step in flight.
        """
        room = seq.num_pages * self.page_size - seq.num_computed
        if room >= tokens:
            return room
        wanted = pages_for(tokens - room, self.page_size)
        pages = min(wanted, self.kv_cache.num_available)
        while pages == 0 and room == 0 and not self._ending and self.running.last is not seq:
            self._preempt(self.running.last)
            pages = min(wanted, self.kv_cache.num_available)
        if pages:
            self.kv_cache.allocate(seq, pages)
        return room + pages * self.page_size

    def _in_order(self, others: list[Sequence]) -> list[Sequence]:
        """Sorts running prefills by the urgency of the waiting queue, so that short prompts overtake a long one."""
        now_s = self.clock()
        return sorted(others, key=lambda seq: self._waiting.queue.urgency(seq, now_s))

    def _admit(self, before: Sequence | None = None) -> None:
        """Starts waiting sequences while there are slots, tokens and pages. With `before`, a running
        prefill, only those at least as urgent."""
        if not self.running.has_room or self._builder.budget.tokens_left <= 0:
            return
        for seq in self._waiting.starting(self.running, self._builder, self._step, before):
            self._start(seq)
            self._schedule_chunk(seq)
            if not self.running.has_room:
                return

    def _start(self, seq: Sequence) -> None:
        """Gives a sequence a slot, and counts its first start."""
        self.running.add(seq)
        if seq.started_s is None:
            seq.started_s = self.clock()
            self._starts_s.append(seq.started_s)
            seq.cached_tokens = min(seq.num_computed, seq.num_prompt)
            self.counters.prompt_tokens += seq.num_prompt
            self.counters.cached_tokens += seq.cached_tokens
        self._builder.watch(seq)

    # ------------------------------------------------------------ preemption and end

    def _preempt(self, seq: Sequence) -> None:
        self._builder.discard(seq)
        if self.config.pp > 1:
            for step in self._in_flight:
                step.drop(seq.row)
            seq.num_tokens, seq.num_pending = seq.num_known, 0
        self._free(seq, keep=True)
        seq.preempted = True
        self._waiting.kv_demand.preempt()
        self.counters.preemptions += 1
        self._waiting.add(seq, self._step)

    def _forget(self, seq: Sequence, keep: bool) -> None:
        """Removes a sequence, waiting or running. Its chunks in flight are dropped. `keep`: its computed pages go to
        the tree."""
        del self._sequences[seq.request_id]
        self._stop_checker.remove(seq)
        if seq.is_running:
            self._free(seq, keep)
        else:
            self._waiting.remove(seq)
        for step in self._in_flight:
            step.drop(seq.row)
        self._table.remove(seq.row)

    def _free(self, seq: Sequence, keep: bool) -> None:
        """Frees a running sequence's slot and pages. `keep`: its computed pages go to the tree first."""
        self.kv_cache.free(seq, keep)
        self._waiting.vacated()
        self.running.remove(seq)

    # ------------------------------------------------------------ tokens

    def _confirm(self, step: ScheduledStep) -> None:
        """Marks the tokens of a step's chunks as confirmed. Whole pages of prompts go to the tree."""
        counts, plan = self._table, step.plan
        there = np.flatnonzero(~step.dropped)
        there = there[counts.slots[step.rows[there]] >= 0]  # without preempted sequences
        rows, starts = step.rows[there], plan.starts[there]
        counts.confirmed[rows] = starts + plan.lengths[there]
        for chunk in there[starts < counts.prompt[rows]].tolist():
            self.kv_cache.cache_prefix(step.sequences[chunk])

    def _append_tokens(self, step: ScheduledStep, chosen: np.ndarray, sampled: "SampledTokens", now_s: float) -> None:
        for place, failure in sampled.failures.items():
            if not step.dropped[chosen[place]]:
                self.fail(step.sequences[chosen[place]].request_id, failure)
        places = np.flatnonzero(~step.dropped[chosen])
        chunks, ids = chosen[places], sampled.token_ids[places]
        rows, counts = step.rows[chunks], self._table
        sequences = [step.sequences[chunk] for chunk in chunks.tolist()]
        given = list(zip(sequences, ids.tolist(), strict=True))
        for seq, token_id in given:
            seq.fresh.append(token_id)
        outputs = [Output(request_id=seq.request_id, token_ids=[token_id]) for seq, token_id in given]
        counts.pending[rows] -= 1
        counts.last_token[rows] = ids
        counts.answered_s[rows] = now_s
        self.counters.output_tokens += len(ids)
        if sampled.logprobs:
            for output, place in zip(outputs, places.tolist(), strict=True):
                if place in sampled.logprobs:
                    output.logprobs = [sampled.logprobs[place]]
        for i in np.flatnonzero(~counts.announced[rows]).tolist():
            self._announce(sequences[i], outputs[i])
        counts.announced[rows] = True
        ends = self._stop_checker.may_stop(counts, rows, ids)
        if sampled.complete:
            ends |= np.isin(places, sampled.complete)
        for i in np.flatnonzero(ends).tolist():
            self._end(sequences[i], outputs[i], int(places[i]) in sampled.complete)
        self._outputs += outputs

    def _announce(self, seq: Sequence, output: Output) -> None:
        """Sets the fields that only a sequence's first output has."""
        output.cached_tokens = seq.cached_tokens
        output.queue_s = (seq.started_s or seq.arrived_s) - seq.arrived_s
        output.prompt_logprobs = seq.prompt_logprobs

    def _end(self, seq: Sequence, output: Output, is_complete: bool) -> None:
        """Removes a sequence if its last token ends it."""
        self._stop_checker.check(seq, output, is_complete)
        if output.finish_reason is not None:
            self._waiting.kv_demand.end(seq)
            self._forget(seq, keep=True)
            self.counters.finished += 1
