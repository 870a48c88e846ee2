"""What the next step computes. Pure Python over token counts and pages: no tensors, no model.

One rule: every sequence's `num_computed` tokens catch up with its tokens. There is no prefill phase and no decode
phase; a decode is a sequence that lacks one token. Each step, whoever lacks one token gets it first, chunks of longer
gaps fill the rest of the token budget, and then waiting sequences start while there are slots, tokens and pages.

When pages run out, cached ones are evicted; then the running sequence that ranks last (lowest priority, latest arrival)
gives up its slot. What it computed goes to the tree, and it waits at the front of its class to go on from whatever of
that is still cached. The sequence that ranks first can take every page that way, and no sequence is let in that needs
more than all of them, so there is always one that moves.

A step may be planned while the one before it runs. The token that a sequence gets from that one is pending: it counts,
its place is planned, and its value comes with `update`. What it ends is noticed then, one step late: of a sequence that
has ended, been aborted or failed, whatever was planned beyond is dropped; one that was preempted keeps its pending
token as an output. Pages may pass to others at once, because steps run in the order in which they were planned; the
tree gets only what steps that have ended computed.

When a step is made, and how much of what waits goes into it, is a policy's to say (`pipeline/schedule.py`); which
sequences these are is decided here.

Of a pipeline several steps are in flight, so that no stage waits for another. A sequence's next chunk may be in the
very next step, but its next decode waits for its token; of the oldest step the tokens may be pending, where the policy
counts it as ended because it is about to end: the last stage then hands them to the first one on their devices. One
that is preempted loses the token in flight, which is sampled again: its slot has a new owner by the time that it would
be sampled.
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
from pipeline.policy import Policy, View
from radix.tree import Tree
from worker.admission import Admission
from worker.batch import Batch, Step
from worker.config import WorkerConfig
from worker.counts import Counts
from worker.ends import Ends
from worker.holdings import Holdings
from worker.messages import Failure, Generate, Load, Output, TokenLogprobs
from worker.refusal import refusal
from worker.request import Sequence, pages_for
from worker.running import Running
from worker.survey import Survey

if TYPE_CHECKING:
    from worker.sampling import SampledTokens


class Scheduler:
    """Owns every sequence from arrival to its last token, and the pages that running ones hold. One thread at a time.

    Use: `step = schedule()`, run its plan, `update(step, …)`, `take_outputs()`. Several steps may be without their
    `update`, as many as the policy begins; updates come in the order of the steps.
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
        returning_s: Callable[[Step], float] = lambda step: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ahead_s`: the time until the first stage is done with all that was sent to it, as the policy wants it.
        `returning_s`: of a pipeline, the time until the tokens of this step, the oldest in flight, lie on the device,
        where the next step may take them; infinity where it may not.
        `clock`: whatever time the caller lives in."""
        self.config = config
        self.policy = policy
        self._ahead_s, self._returning_s = ahead_s, returning_s
        self.holdings = Holdings(tree)
        self.num_pages = tree.pool.num_pages
        self.page_size = tree.page_size
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.kv_tokens = self.num_pages * self.page_size
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self.clock = clock
        self.counters = Load(incarnation="", kv_tokens_total=self.kv_tokens)
        # More running sequences than tokens in a step would only wait for each other with pages in hand.
        num_slots = min(config.max_running, config.token_budget)
        self.running = Running(num_slots)
        self._sequences: dict[str, Sequence] = {}
        self._counts = Counts(config.max_waiting + num_slots)
        self._waiting = Admission(config, self.holdings, self._counts, clock, policy.longest_first)
        self._ends = Ends(vocab_size)
        self._outputs: list[Output] = []
        self._batch = Batch(Budget(0), self.page_size, self._counts)  # this step's
        self._view = View()  # as it was before
        self._returning: Step | None = None  # what counts as ended, but for its tokens
        self._in_flight: deque[Step] = deque()  # steps without their update
        # If the last `schedule` had a place for a step and nothing to put into it: why, as the meter says it.
        self.found_nothing: str | None = None
        self._ending = False  # whether a running sequence ends with a step in flight
        self._step = 0
        self._num_arrivals = 0

    # ------------------------------------------------------------ requests come and go

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, those whose grammar compiles among them."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` has anything to consider, or outputs are to be taken."""
        return bool(self.running or self._outputs or len(self._waiting.queue))

    def add(self, request: Generate, ready: bool = True) -> bool:
        """Takes a request; with `ready` False it is not run until `release`. Returns False when nothing is left to do
        for it: it was refused or is complete already, and `take_outputs` says so. Raises ValueError for an id that is
        in use."""
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use: ids must be unique while a request lives")
        failure = self._refusal(request)
        if failure is not None:
            self.counters.failed += 1
            self._outputs.append(Output(request_id=request.request_id, finish_reason="error", failure=failure))
            return False
        limit = min(len(request.prompt_ids) + request.sampling.max_tokens, self.context_length, self.kv_tokens)
        self._num_arrivals += 1
        seq = Sequence(
            request,
            self._counts,
            arrival=self._num_arrivals,
            arrived_s=self.clock(),
            token_limit=limit,
            eos_token_ids=self.eos_token_ids,
        )
        if request.output_ids and self._finish_complete(seq):
            return False
        self._sequences[seq.request_id] = seq
        self._ends.add(seq)
        self._waiting.add(seq, self._step, ready)
        return True

    def release(self, request_id: str) -> Sequence:
        """A request that was added with `ready` False may run now."""
        return self._waiting.release(request_id, self._step)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets these requests, wherever they are, and frees their pages. Unknown ids are ignored. No output
        follows."""
        request_ids = dict.fromkeys(request_ids)
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]
        for request_id in request_ids:
            seq = self._sequences.get(request_id)
            if seq is not None:
                self._forget(seq, keep=True)
                self.counters.aborts += 1

    def fail(self, request_id: str, failure: Failure) -> None:
        """Ends this request alone with `failure`. Whatever it computed is thrown away, since it may be what failed."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._forget(seq, keep=False)
            self.counters.failed += 1
            self._outputs.append(Output(request_id=request_id, finish_reason="error", failure=failure))

    def take_outputs(self) -> list[Output]:
        """What there is to tell since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ------------------------------------------------------------ a step

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to compute now or the policy wants to wait (`ask_again_s`).
        `running.started` then names the sequences that are new in it."""
        self.running.started.clear()
        self.found_nothing = None
        running = Survey.of(self.running.rows, self._counts)
        view = self._view = self._look(running)
        is_clumped = view.decoding >= self.config.pp or view.waiting > 0
        budget = self.policy.begin(view)
        step = self._make(budget, running)
        if budget is not None and step is None and view.decoding and view.waiting_tokens:
            # Decodes may have been held back for prompts that find no pages now.
            view.waiting = view.waiting_tokens = 0
            budget = self.policy.begin(view)
            step = self._make(budget, Survey.of(self.running.rows, self._counts))
        if step is not None:
            self._in_flight.append(step)
        elif budget is not None:
            self.found_nothing = "clumped" if is_clumped else "nothing_to_do"
        return step

    def ask_again_s(self) -> float:
        """After what time `schedule`, which has just given None, may give a step though nothing else happens."""
        self._look_ahead(self._view)
        return self.policy.ask_again_s(self._view, is_idle=self.found_nothing is not None)

    def _make(self, budget: Budget | None, running: Survey) -> Step | None:
        """A step of what there is to compute and the budget allows, if there is one."""
        if budget is None:
            return None
        self._ending = running.is_ending
        self._batch = Batch(budget, self.page_size, self._counts)
        preemptions = self.counters.preemptions
        for seq in self._go_on(running):
            self._plan(seq)
        # Right after a preemption, what it freed is for those that run.
        if len(self._waiting.queue) and self.counters.preemptions == preemptions:
            self._admit()
        if not self._batch:
            return None
        self._step += 1
        self.counters.steps = self._step
        return self._batch.step(self._step, None if self._returning is None else self._returning.plan.step)

    def update(
        self,
        step: Step,
        chosen: np.ndarray,
        sampled: "SampledTokens | None",
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> None:
        """Takes back what a step gave: `sampled`, the next tokens of the sequences of the chunks `chosen` (integers),
        all those that were to get one and had not gone by then; and log probabilities of prompts, by chunk. Sequences
        that have gone since are skipped. A slot may be another's by now, so they are those that were planned."""
        assert self._in_flight[0] is step, "updates come in the order of the steps"
        now_s = self.clock()
        is_decode = step.gives & (step.plan.lengths == 1) & (step.plan.starts >= self._counts.prompt[step.rows])
        decodes = step.rows[is_decode & ~step.gone]
        if len(decodes):
            self.policy.finished(now_s - float(self._counts.answered_s[decodes].min()))
        self._confirm(step)
        for chunk, logprobs in prompt_logprobs.items():
            known = step.sequences[chunk].prompt_logprobs
            if known is not None and not step.gone[chunk]:
                known.extend(logprobs)
        if sampled is not None:
            self._take_tokens(step, chosen, sampled, now_s)
        self._in_flight.popleft()

    # ------------------------------------------------------------ what is there

    def load(self) -> Load:
        """What is carried now, in tokens, and the counters. `incarnation` and `bookings_seen` are the caller's."""
        load = copy.copy(self.counters)
        load.running = len(self.running)
        load.waiting = len(self._waiting)
        rows, waiting, counts = self.running.rows, self._waiting.rows, self._counts
        load.context_tokens = int(counts.computed[rows].sum())
        load.waiting_tokens = int(np.maximum(counts.prompt[rows] - counts.computed[rows], 0).sum())
        load.waiting_tokens += int(np.maximum(counts.prompt[waiting] - counts.cached[waiting], 0).sum())
        load.kv_tokens_cached = self.holdings.tree.num_evictable * self.page_size
        load.kv_tokens_used = self.kv_tokens - self.holdings.num_available * self.page_size
        return load

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page has one owner and every sequence one place. Walks everything."""
        self.running.check_integrity()
        self.holdings.check_integrity(self.running)
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
        self._counts.check_integrity(places)
        for seq in places:
            assert (seq.num_known, seq.num_pages) == (seq.tokens.size, seq.pages.size), "counted wrongly"

    # ------------------------------------------------------------ arrival

    def _refusal(self, request: Generate) -> Failure | None:
        if self.num_waiting >= self.config.max_waiting:
            return Failure("overloaded", f"{self.num_waiting} requests are waiting already: try again later")
        return refusal(
            request, vocab_size=self.vocab_size, context_length=self.context_length, kv_tokens=self.kv_tokens
        )

    def _finish_complete(self, seq: Sequence) -> bool:
        """A resumed sequence may have had its last token before it came here."""
        output = Output(request_id=seq.request_id)
        self._ends.judge(seq, output)
        if output.finish_reason is None:
            return False
        self._counts.close(seq.row)
        self.counters.finished += 1
        self._outputs.append(output)
        return True

    # ------------------------------------------------------------ choosing

    def _look(self, running: Survey) -> View:
        """What the policy is shown."""
        counts, queue = self._counts, self._waiting.queue.rows
        view = running.view(counts)
        view.free_kv = self.holdings.num_available / self.num_pages
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
        if self._in_flight and self.policy.counts_as_ended(view):
            self._returning = self._in_flight[0]
            view.in_flight = view.in_flight[1:]
        if self.policy.longest_first and view.waiting_tokens and not view.blocked_tokens:
            view.horizon = running.horizon(counts, queue)
        return view

    def _look_ahead(self, view: View) -> None:
        """What the policy is shown of times to come."""
        view.ahead_s = self._ahead_s()
        is_away = self.config.pp > 1 and self._in_flight and self._returning is None
        view.returning_s = self._returning_s(self._in_flight[0]) if is_away else math.inf

    def _go_on(self, running: Survey) -> list[Sequence]:
        """Puts running sequences that lack their last output into this step, as many as the budget takes. Returns those
        that lack something else: they follow one by one."""
        rows, counts = running.rows, self._counts
        decode, going = running.decode, running.going
        if self.config.pp > 1:
            is_known = counts.pending[rows] == 0
            if (back := self._returning) is not None:
                is_known |= (counts.pending[rows] == 1) & np.isin(rows, back.rows[back.gives & ~back.gone])
            decode, going = decode & is_known, going & is_known
            if not self.policy.chunks_follow:
                going &= counts.confirmed[rows] == running.computed
        if np.count_nonzero(running.in_prompt):
            for seq in counts.of(rows[running.in_prompt]):
                self._batch.watch(seq)
        others = counts.of(rows[going]) if np.count_nonzero(going) else []
        self._decode(rows[decode])
        return others

    def _decode(self, ready: np.ndarray) -> None:
        """Puts the next decode of sequences into this step, whose rows, int64, are `ready`, in the order of their
        ranks. Those go first whose last token came first; if there may be no pages for all, those of the first ranks:
        the first of all alone moves for sure."""
        counts, budget = self._counts, self._batch.budget
        decodes = ready
        if self.config.pp > 1:
            since_s = np.where(counts.pending[ready] > 0, math.inf, counts.answered_s[ready])
            decodes = ready[np.argsort(since_s, kind="stable")]
        contexts = counts.computed[decodes]
        taken = budget.take_decodes(contexts)
        decodes, contexts = decodes[:taken], contexts[:taken]
        short = decodes[contexts >= counts.pages[decodes] * self.page_size]
        if len(short) <= self.holdings.num_available:
            if len(short):
                self.holdings.grow_each(counts.of(short))
            self._batch.add_decodes(decodes)
            return
        for context in contexts.tolist():
            budget.remove(context, 1)
        for seq in counts.of(ready):
            if taken and seq.is_running and self._make_room(seq, 1):
                self._batch.add(seq, 1)
                taken -= 1

    def _plan(self, seq: Sequence) -> None:
        """Puts the next chunk of a running sequence into this step, unless there are no tokens or pages for it now."""
        if seq.slot < 0:
            return  # preempted by one that ranks before it
        limit = self._batch.limit(seq)
        size = chunk_tokens(seq.num_missing, limit, self._make_room(seq, limit)) if limit > 0 else 0
        if size > 0:
            self._batch.add(seq, size)

    def _make_room(self, seq: Sequence, tokens: int) -> int:
        """Gets pages for `tokens` more tokens of a running sequence, or for as many as are to be had. It takes pages
        from those that rank below it only when it could not move at all, and not when one that ends with
        the step in flight is about to give its own back. Returns the tokens that fit now."""
        room = seq.num_pages * self.page_size - seq.num_computed
        if room >= tokens:
            return room
        wanted = pages_for(tokens - room, self.page_size)
        pages = min(wanted, self.holdings.num_available)
        while pages == 0 and room == 0 and not self._ending and self.running.last is not seq:
            self._preempt(self.running.last)
            pages = min(wanted, self.holdings.num_available)
        if pages:
            self.holdings.grow(seq, pages)
        return room + pages * self.page_size

    def _admit(self) -> None:
        """Starts waiting sequences while there are slots, tokens and pages."""
        if not self.running.has_room or self._batch.budget.tokens_left <= 0:
            return
        for seq in self._waiting.starting(self.running, self._batch, self._step):
            self._seat(seq)
            self._plan(seq)
            if not self.running.has_room:
                return

    def _seat(self, seq: Sequence) -> None:
        """Gives a sequence that starts its slot."""
        self.running.seat(seq)
        if seq.started_s is None:
            seq.started_s = self.clock()
            seq.cached_tokens = min(seq.num_computed, seq.num_prompt)
            self.counters.prompt_tokens += seq.num_prompt
            self.counters.cached_tokens += seq.cached_tokens
        self._batch.watch(seq)

    # ------------------------------------------------------------ giving back

    def _preempt(self, seq: Sequence) -> None:
        self._batch.discard(seq)
        if self.config.pp > 1:
            for step in self._in_flight:
                step.leave(seq.row)
            seq.num_tokens, seq.num_pending = seq.num_known, 0
        self._vacate(seq, keep=True)
        seq.preempted = True
        self._waiting.forecast.preempt()
        self.counters.preemptions += 1
        self._waiting.add(seq, self._step)

    def _forget(self, seq: Sequence, keep: bool) -> None:
        """Ends a sequence, wherever it is: whatever is in flight of it is dropped."""
        del self._sequences[seq.request_id]
        self._ends.remove(seq)
        if seq.is_running:
            self._vacate(seq, keep)
        else:
            self._waiting.remove(seq)
        for step in self._in_flight:
            step.leave(seq.row)
        self._counts.close(seq.row)

    def _vacate(self, seq: Sequence, keep: bool) -> None:
        """Takes a running sequence's slot and pages."""
        self.holdings.close(seq, keep)
        self._waiting.vacated()
        self.running.vacate(seq)

    # ------------------------------------------------------------ tokens

    def _confirm(self, step: Step) -> None:
        """The chunks of a step are computed. The tree gets what that filled of prompts."""
        counts, plan = self._counts, step.plan
        there = np.flatnonzero(~step.gone)
        there = there[counts.slots[step.rows[there]] >= 0]  # the others were preempted
        rows, starts = step.rows[there], plan.starts[there]
        counts.confirmed[rows] = starts + plan.lengths[there]
        for chunk in there[starts < counts.prompt[rows]].tolist():
            self.holdings.cache(step.sequences[chunk])

    def _take_tokens(self, step: Step, chosen: np.ndarray, sampled: "SampledTokens", now_s: float) -> None:
        for place, failure in sampled.failures.items():
            if not step.gone[chosen[place]]:
                self.fail(step.sequences[chosen[place]].request_id, failure)
        places = np.flatnonzero(~step.gone[chosen])
        chunks, ids = chosen[places], sampled.token_ids[places]
        rows, counts = step.rows[chunks], self._counts
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
        ends = self._ends.may_end(counts, rows, ids)
        if sampled.complete:
            ends |= np.isin(places, sampled.complete)
        for i in np.flatnonzero(ends).tolist():
            self._end(sequences[i], outputs[i], int(places[i]) in sampled.complete)
        self._outputs += outputs

    def _announce(self, seq: Sequence, output: Output) -> None:
        """What the first output says beside its token."""
        output.cached_tokens = seq.cached_tokens
        output.queue_s = (seq.started_s or seq.arrived_s) - seq.arrived_s
        output.prompt_logprobs = seq.prompt_logprobs

    def _end(self, seq: Sequence, output: Output, is_complete: bool) -> None:
        """Forgets a sequence if its last token ends it."""
        self._ends.judge(seq, output, is_complete)
        if output.finish_reason is not None:
            self._waiting.forecast.end(seq)
            self._forget(seq, keep=True)
            self.counters.finished += 1
