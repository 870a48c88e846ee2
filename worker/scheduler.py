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
"""

import copy
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from pipeline.chunk import chunk_tokens
from radix.tree import Tree
from worker.batch import Batch
from worker.config import WorkerConfig
from worker.forecast import Forecast
from worker.holdings import Holdings
from worker.messages import Failure, Generate, Load, Output, TokenLogprobs
from worker.plan import Plan
from worker.refusal import refusal
from worker.request import Sequence, pages_for
from worker.waiting import WaitingQueue

if TYPE_CHECKING:
    from worker.sampling import Sampled

# A sequence that found no room tries again after so many steps even if nobody has come or gone.
RETRY_STEPS = 16


class Scheduler:
    """Owns every sequence from arrival to its last token, and the pages that running ones hold. One thread at a time.

    Use: `plan = schedule()`, run it, `update(plan, sampled)`, `take_outputs()`. One more `schedule` may come before the
    `update` of a plan; updates come in the order of the plans.
    """

    def __init__(
        self,
        config: WorkerConfig,
        tree: Tree,
        *,
        vocab_size: int,
        context_length: int,
        eos_token_ids: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.holdings = Holdings(tree)
        self.num_pages = tree.pool.num_pages
        self.page_size = tree.page_size
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.kv_tokens = self.num_pages * self.page_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.clock = clock
        self.counters = Load(incarnation="", kv_tokens_total=self.kv_tokens)
        # Given by `schedule`: sequences that got a slot in this step. Slots given up since the caller cleared it.
        self.started: list[Sequence] = []
        self.vacated: list[int] = []
        # More running sequences than tokens in a step would only wait for each other with pages in hand.
        num_slots = min(config.max_running, config.token_budget)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._by_slot: list[Sequence | None] = [None] * num_slots
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # by rank
        self._waiting = WaitingQueue(config.starvation_s, self.holdings.cached_tokens)
        self._held: dict[str, Sequence] = {}  # not ready: their grammar compiles
        self._outputs: list[Output] = []
        self._batch = Batch(0, self.page_size)  # this step's
        self._forecast = Forecast(self.page_size)
        self._blocked_at: tuple[int, ...] | None = None  # when a waiting sequence last found no room
        self._num_departures = 0
        self._in_flight: deque[tuple[Plan, list[Sequence]]] = deque()  # plans without their update, with who is in them
        self._ending = False  # whether a running sequence ends with the step in flight
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
        return len(self._waiting) + len(self._held)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` has anything to consider, or outputs are to be taken."""
        return bool(self._running or self._outputs or len(self._waiting))

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
        seq = Sequence(request, self._num_arrivals, self.clock(), limit, self.eos_token_ids)
        if request.output_ids and self._finish_complete(seq):
            return False
        self._sequences[seq.request_id] = seq
        if ready:
            self._waiting.add(seq, self._step)
        else:
            self._held[seq.request_id] = seq
        return True

    def release(self, request_id: str) -> Sequence:
        """A request that was added with `ready` False may run now."""
        seq = self._held.pop(request_id)
        self._waiting.add(seq, self._step)
        return seq

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets these requests, wherever they are, and frees their pages. Unknown ids are ignored. No output
        follows."""
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

    def schedule(self) -> Plan | None:
        """The next step, or None when there is nothing to compute. `started` then names the sequences that are new in
        it."""
        assert len(self._in_flight) < 2, "a plan has had no update for two steps"
        self.started.clear()
        self._batch = Batch(self.config.token_budget, self.page_size)
        preemptions = self.counters.preemptions
        decodes, others = self._unfinished()
        for seq in decodes:
            if seq.num_computed < seq.pages.size * self.page_size and seq.slot >= 0 and self._batch.tokens_left > 0:
                self._batch.add_decode(seq)
            else:
                self._plan(seq)
        for seq in others:
            self._plan(seq)
        # Right after a preemption, what it freed is for those that run.
        if len(self._waiting) and self.counters.preemptions == preemptions:
            self._admit()
        if not self._batch:
            return None
        self._step += 1
        self.counters.steps = self._step
        plan = self._batch.plan(self._step)
        self._in_flight.append((plan, self._batch.sequences()))
        return plan

    def withdraw_ended(self, plan: Plan) -> None:
        """Takes out of the newest plan, before it runs, whoever has ended since it was made."""
        newest, sequences = self._in_flight[-1]
        assert newest is plan
        plan.chunks = [chunk for chunk, seq in zip(plan.chunks, sequences, strict=True) if not seq.ended]
        sequences[:] = [seq for seq in sequences if not seq.ended]

    def sequence(self, slot: int) -> Sequence | None:
        """Who runs in `slot`."""
        return self._by_slot[slot]

    def update(
        self, plan: Plan, sampled: "dict[int, Sampled]", prompt_logprobs: dict[int, list[TokenLogprobs]]
    ) -> None:
        """Takes back what a plan gave, by the slots in it: a token for every sequence of which nothing was missing
        after it, and log probabilities of prompts. Sequences that have ended since are skipped. A slot may be another's
        by now, so sequences are those that were planned."""
        oldest, sequences = self._in_flight.popleft()
        assert oldest is plan, "updates come in the order of the plans"
        for chunk, seq in zip(plan.chunks, sequences, strict=True):
            if seq.ended:
                continue
            slot, start = chunk.slot, chunk.start
            end = start + len(chunk.token_ids)
            if seq.slot >= 0:  # else it was preempted
                seq.num_confirmed = end
                if start < seq.num_prompt:
                    self.holdings.cache(seq)
            if seq.prompt_logprobs is not None and slot in prompt_logprobs:
                seq.prompt_logprobs.extend(prompt_logprobs[slot])
            if end == seq.tokens.size:
                seq.num_pending -= 1
                self._take_token(seq, sampled[slot])

    # ------------------------------------------------------------ what is there

    def load(self) -> Load:
        """What is carried now, in tokens, and the counters. `incarnation` and `bookings_seen` are the caller's."""
        load = copy.copy(self.counters)
        others = [*self._waiting, *self._held.values()]
        load.running = len(self._running)
        load.waiting = len(others)
        load.context_tokens = sum(seq.num_computed for seq in self._running)
        load.waiting_tokens = sum(max(0, seq.num_prompt - seq.num_computed) for seq in self._running)
        load.waiting_tokens += sum(max(0, seq.num_prompt - seq.cached_estimate) for seq in others)
        load.kv_tokens_cached = self.holdings.tree.num_evictable * self.page_size
        load.kv_tokens_used = self.kv_tokens - self.holdings.num_available * self.page_size
        return load

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page has one owner and every sequence one place. Walks everything."""
        self.holdings.check_integrity(self._running)
        waiting = [*self._waiting, *self._held.values()]
        places = [*self._running, *waiting]
        assert len(places) == len(self._sequences), "a sequence is nowhere, or in two places"
        assert all(self._sequences[seq.request_id] is seq for seq in places)
        assert len(self._running) + len(self._free_slots) == len(self._by_slot), "a slot is lost"
        assert self._running == sorted(self._running, key=lambda seq: seq.rank)
        for seq in self._running:
            assert self._by_slot[seq.slot] is seq
            assert seq.num_computed <= seq.pages.size * self.page_size, "tokens without a page"
            assert seq.num_confirmed <= min(seq.num_computed, seq.tokens.size)
            assert seq.num_pending <= len(self._in_flight) and not seq.ended
        for seq in waiting:
            assert seq.slot == -1 and seq.pages.size == 0 and seq.node is None, "a waiting sequence holds pages"

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
        self._judge(seq, output)
        if output.finish_reason is None:
            return False
        self.counters.finished += 1
        self._outputs.append(output)
        return True

    # ------------------------------------------------------------ choosing

    def _unfinished(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that have something to compute: those that lack their last output, and those that lack
        something else."""
        decodes, others = [], []
        self._ending = False
        for seq in self._running:
            tokens = seq.tokens.size + seq.num_pending
            in_prompt = seq.num_confirmed < seq.num_prompt
            if in_prompt:
                self._batch.watch(seq)
            if tokens >= seq.token_limit:
                self._ending = True
            elif tokens - seq.num_computed == 1 and not in_prompt:
                decodes.append(seq)
            else:
                others.append(seq)
        return decodes, others

    def _plan(self, seq: Sequence) -> None:
        """Puts the next chunk of a running sequence into this step, unless there are no tokens or pages for it now."""
        if seq.slot < 0:
            return  # preempted by one that ranks before it
        missing, budget = seq.num_missing, self._batch.budget_for(seq)
        size = min(missing, budget)
        if size > 0:
            size = chunk_tokens(missing, budget, self._make_room(seq, size))
        if size > 0:
            self._batch.add(seq, size)

    def _make_room(self, seq: Sequence, tokens: int) -> int:
        """Gets pages for `tokens` more tokens of a running sequence, or for as many as are to be had. It takes pages
        from those that rank below it only when it could not move at all, and not when one that ends with
        the step in flight is about to give its own back. Returns the tokens that fit now."""
        room = seq.pages.size * self.page_size - seq.num_computed
        if room >= tokens:
            return room
        wanted = pages_for(tokens - room, self.page_size)
        pages = min(wanted, self.holdings.num_available)
        while pages == 0 and room == 0 and not self._ending and self._running[-1] is not seq:
            self._preempt(self._running[-1])
            pages = min(wanted, self.holdings.num_available)
        if pages:
            self.holdings.grow(seq, pages)
        return room + pages * self.page_size

    def _admit(self) -> None:
        """Starts waiting sequences while there are slots, tokens and pages. One that does not fit holds up those behind
        it, or a long prompt would wait forever; one whose prefix is being computed does not."""
        if not self._free_slots or self._batch.tokens_left <= 0:
            return
        comings = self._num_arrivals, self._num_departures, len(self._waiting), self._step // RETRY_STEPS
        if self._blocked_at == comings:
            return
        now_s = self.clock()
        self._forecast.begin(self._running)
        for seq in self._waiting.in_order(self._step, now_s):
            if not self._free_slots or self._batch.tokens_left <= 0:
                return
            if self._batch.computes_prefix_of(seq):
                continue  # even one that starves, since it has less to compute then, and is next
            if not self._start(seq, now_s):
                self._blocked_at = comings
                return

    def _start(self, seq: Sequence, now_s: float) -> bool:
        """Gives a waiting sequence a slot and its first chunk, if there are pages for all the tokens that it has now
        beside what it and the running ones are going to need."""
        least = pages_for(seq.tokens.size, self.page_size) - pages_for(seq.cached_estimate, self.page_size)
        if self._running and least > self.holdings.num_available:
            return False  # without asking the tree
        self.holdings.open(seq)
        if not self._forecast.has_room(seq, self.holdings.num_available):
            self.holdings.close(seq, keep=False)
            return False
        self._waiting.remove(seq)
        seq.slot = self._free_slots.pop()
        self._by_slot[seq.slot] = seq
        insort(self._running, seq, key=lambda s: s.rank)
        self.started.append(seq)
        if seq.started_s is None:
            seq.started_s = now_s
            seq.cached_tokens = min(seq.num_computed, seq.num_prompt)
            self.counters.prompt_tokens += seq.num_prompt
            self.counters.cached_tokens += seq.cached_tokens
        self._batch.watch(seq)
        self._plan(seq)
        self._forecast.start(seq)
        return True

    # ------------------------------------------------------------ giving back

    def _preempt(self, seq: Sequence) -> None:
        self._batch.discard(seq)
        self._vacate(seq, keep=True)
        seq.preempted = True
        self._forecast.preempt()
        self.counters.preemptions += 1
        self._waiting.add(seq, self._step)

    def _forget(self, seq: Sequence, keep: bool) -> None:
        del self._sequences[seq.request_id]
        seq.ended = True
        if seq.is_running:
            self._vacate(seq, keep)
        elif self._held.pop(seq.request_id, None) is None:
            self._waiting.remove(seq)

    def _vacate(self, seq: Sequence, keep: bool) -> None:
        """Takes a running sequence's slot and pages."""
        self.holdings.close(seq, keep)
        self._num_departures += 1
        self._running.remove(seq)
        self._by_slot[seq.slot] = None
        self._free_slots.append(seq.slot)
        self.vacated.append(seq.slot)
        seq.slot = -1

    # ------------------------------------------------------------ tokens

    def _take_token(self, seq: Sequence, sampled: "Sampled") -> None:
        if sampled.failure is not None:
            self.fail(seq.request_id, sampled.failure)
            return
        token_id = sampled.token_id
        seq.append(token_id)
        self.counters.output_tokens += 1
        output = Output(request_id=seq.request_id, token_ids=[token_id])
        if sampled.logprobs is not None:
            output.logprobs = [sampled.logprobs]
        if not seq.announced:
            seq.announced = True
            output.cached_tokens = seq.cached_tokens
            output.queue_s = (seq.started_s or seq.arrived_s) - seq.arrived_s
            output.prompt_logprobs = seq.prompt_logprobs
        # `_judge` finds nothing for most.
        ends = token_id in seq.stop_ids or seq.tokens.size >= seq.token_limit
        if ends or seq.grammar is not None:
            self._judge(seq, output)
        if output.finish_reason is not None:
            self._forget(seq, keep=True)
            self.counters.finished += 1
            self._forecast.end(seq)
        self._outputs.append(output)

    def _judge(self, seq: Sequence, output: Output) -> None:
        """Writes into `output` whether the sequence's last token ends it."""
        # A grammar is complete when it has taken an end token: it needs one even where `ignore_eos` is set.
        if seq.last_token in seq.stop_ids or (seq.grammar is not None and seq.grammar.terminated):
            output.finish_reason = "stop"
            output.stop_token_id = seq.last_token
        elif seq.tokens.size >= seq.token_limit:
            output.finish_reason = "length"
