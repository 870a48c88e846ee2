"""A simulated replica that is fast enough for fleets of hundreds.

Real: the radix tree with its events and its eviction of the least recently used, the policy that sizes chunks, the
cost model. Simpler than the scheduler's: admission forecasts mean output lengths, decodes grow by sixteenths of a page,
and a step is planned when the one before it ends. `tests/bench/fleet/test_replica.py` compares both.

Decodes alone are advanced many steps at a time, since nothing changes in between.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal

import numpy as np

from bench.fleet.hardware import MAX_RUNNING, TOKEN_BUDGET, ReplicaHardware
from bench.fleet.workloads import FleetRequest, common_tokens, token_ids
from pipeline.budget import Budget
from pipeline.policy import SchedulerView
from pipeline.shape import BatchShape
from radix.events import Event
from radix.node import PagedNode
from radix.pages import PagePool
from radix.tree import Match, Tree
from worker.engine.step_costs import step_costs
from worker.messages import CacheEvents, ReplicaLoad
from worker.scheduler.admission import RETRY_STEPS
from worker.scheduler.fair_share import ClientShare, FairShare
from worker.scheduler.waiting_queue import AGEING_TOKENS_S, LOOKUP_EVERY_STEPS, LOOKUPS_A_STEP, WINDOW_SEQUENCES

PUBLISH_EVERY_S = 0.05  # as `worker.engine.server`
STARVATION_S = 5.0  # as the setting's default


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A request on a replica.

    | field | meaning |
    | --- | --- |
    | `tokens` | int32 [n]: the prompt, and after a preemption the output so far |
    | `cached`, `looked_up_step` | tokens in the tree, as looked up before that step |
    | `computed` | of `tokens`, cached ones included |
    | `own_pages` | pages that the tree does not have, without those of tokens decoded since `began_round` |
    | `began_round`, `ends_round` | the replica's round in which its decodes began, and of its last token |
    | `produced` | output tokens before `began_round` |
    """

    request: FleetRequest
    tokens: np.ndarray
    arrived_s: float
    share: ClientShare
    cached: int = 0
    looked_up_step: int = 0
    computed: int = 0
    own_pages: int = 0
    node: PagedNode | None = None
    began_round: int = 0
    ends_round: int = 0
    produced: int = 0
    was_preempted: bool = False

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(slots=True)
class StepResult:
    """The outcome of one or more steps: the requests that began, with their cached tokens; those that got their first
    and their last token."""

    began: list[tuple[FleetRequest, int]] = field(default_factory=list)
    first: list[FleetRequest] = field(default_factory=list)
    last: list[FleetRequest] = field(default_factory=list)


class FleetReplica:
    """A simulated replica. The owner calls `take` for each arrival, and `end_step` at `busy_until_s`, which is infinite
    while it is idle. `order` of those that wait: as the scheduler's, with clients in turn (fair), or by arrival."""

    def __init__(
        self, hardware: ReplicaHardware, num_routers: int = 1, order: Literal["fair", "fcfs"] = "fair"
    ) -> None:
        self._order = order
        self._shares = FairShare()
        self._decodes_of: Counter[ClientShare] = Counter()
        self.costs, self.policy, self.page_size = hardware.costs, hardware.policy(), hardware.page_size
        self.step_costs = step_costs([hardware.cost_model], hardware.objective, TOKEN_BUDGET)
        self.events: list[Event] = []
        self.pool = PagePool(hardware.num_pages, hardware.page_size)
        self.tree = Tree(hardware.page_size, self.pool, on_event=self.events.append)
        self.busy_until_s = math.inf
        self.load_due, self.published_s = False, -math.inf
        self.preemptions = self.computed_tokens = self.finished = self.output_tokens = 0
        self.prompt_tokens = self.cached_tokens = 0  # of requests that began
        self.seen = [0] * num_routers  # highest booking of each router
        self._next_event = 0
        self._waiting: list[SimulatedSequence] = []
        self._prefilling: list[SimulatedSequence] = []
        self._decoding: list[tuple[int, int, SimulatedSequence]] = []  # a heap by the round of the last token
        self._serial = count()
        self._round = 0  # steps with decodes so far
        self._plans = 0  # steps that were planned
        self._blocked_until = 0  # no sequence starts in plans before this one: there is no room
        self._context = 0  # tokens of decodes
        self._grown = 0  # tokens that the decodes have got since they began
        self._own_pages = 0  # of all sequences, without those of `_grown`
        self._outputs: deque[int] = deque([200], maxlen=128)  # newest output lengths
        self._step: list[tuple[SimulatedSequence, int]] = []  # chunks of the step that runs
        self._stretch: tuple[float, float, float, int] | None = None  # start, first step's seconds, growth, steps

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def held_tokens(self) -> int:
        """Tokens of all requests here, waiting ones included."""
        return sum(len(seq.tokens) for seq in (*self._waiting, *self._prefilling)) + self._context

    # ------------------------------------------------------------ in and out

    def take(
        self, request: FleetRequest, tokens: np.ndarray, now_s: float, router: int = 0, booking: int = 0
    ) -> StepResult:
        """A request arrives. `tokens`: its prompt, int32 [n]. Returns which requests began."""
        share = self._shares.open(request.client, "", 1.0)
        seq, result = SimulatedSequence(request, tokens, now_s, share), StepResult()
        self._shares.enqueue(share)
        seq.cached, seq.looked_up_step = self._match(seq).num_tokens, self._plans
        self._waiting.append(seq)
        self.seen[router] = max(self.seen[router], booking)
        self.load_due, self._blocked_until = True, 0
        if self.busy_until_s == math.inf:
            self._begin(now_s, result)
        elif self._stretch is not None:
            self._cut_stretch(now_s)
        return result

    def cache_events(self) -> CacheEvents | None:
        """The events since the last call; None if there are none."""
        if not self.events:
            return None
        events = CacheEvents.of("", self._next_event, self.events, self.page_size)
        self._next_event += len(self.events)
        self.events.clear()
        return events

    def load(self) -> ReplicaLoad:
        """The load as the scheduler publishes it."""
        rest = [(seq.cached, len(seq.tokens) - seq.cached) for seq in self._waiting]
        rest += [(seq.computed, seq.missing) for seq in self._prefilling]
        return ReplicaLoad(
            incarnation="",
            costs=self.step_costs,
            waiting_tokens=sum(missing for _, missing in rest),
            waiting_products=sum(missing * (done + missing // 2) for done, missing in rest),
            context_tokens=self._context + sum(seq.computed for seq in self._prefilling),
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._waiting),
            kv_tokens_total=self.pool.num_pages * self.page_size,
            kv_tokens_used=(self.pool.num_pages - self._num_available) * self.page_size,
            kv_tokens_cached=self.tree.num_evictable * self.page_size,
            output_tokens=self.output_tokens,
            finished=self.finished,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
        )

    # ------------------------------------------------------------ steps

    def end_step(self, now_s: float) -> StepResult:
        """Ends the steps that run until `busy_until_s`, and begins the next."""
        result = StepResult()
        if self._decoding:
            steps = 1 if self._stretch is None else self._stretch[3]
            self._round += steps
            self._context += steps * len(self._decoding)
            self._grown += steps * len(self._decoding)
            if self._shares.counts:
                for share, decodes in self._decodes_of.items():
                    self._shares.charge_outputs(np.full(steps * decodes, share.index))
            while self._decoding and self._decoding[0][0] <= self._round:
                ended = heappop(self._decoding)[2]
                self._decodes_of[ended.share] -= 1
                self._finish(ended, result)
        for seq, chunk in self._step:
            seq.computed += chunk
            self.computed_tokens += chunk
            self._cache_prefix(seq)
            if not seq.missing:
                self._prefilling.remove(seq)
                self._begin_decoding(seq, result)
        self._make_room_to_decode()
        self._begin(now_s, result)
        return result

    def _begin(self, now_s: float, result: StepResult) -> None:
        """Begins the next step, or rests."""
        self._step, self._stretch, self.busy_until_s = [], None, math.inf
        if self._waiting or self._prefilling:
            self._plan(now_s, result)
        decodes = len(self._decoding)
        shape = BatchShape.decoding(decodes, self._context + decodes)
        if self._step:
            for seq, chunk in self._step:
                shape.add(seq.computed, chunk)
            self.busy_until_s = now_s + self.costs.predict(shape)
        elif decodes:
            first_s, growth_s = self.costs.predict(shape), self.costs.decode_context * decodes
            steps = max(1, min(self._decoding[0][0] - self._round, int(PUBLISH_EVERY_S / first_s) + 1))
            self._stretch = (now_s, first_s, growth_s, steps)
            self.busy_until_s = now_s + _stretch_s(first_s, growth_s, steps)

    def _cut_stretch(self, now_s: float) -> None:
        """Ends the steps of decodes alone with the one that runs now: a request has arrived."""
        assert self._stretch is not None
        start_s, first_s, growth_s, steps = self._stretch
        steps = max(1, min(steps, math.ceil((now_s - start_s) / first_s)))
        while steps > 1 and start_s + _stretch_s(first_s, growth_s, steps - 1) >= now_s:
            steps -= 1
        self._stretch = (start_s, first_s, growth_s, steps)
        self.busy_until_s = start_s + _stretch_s(first_s, growth_s, steps)

    def _plan(self, now_s: float, result: StepResult) -> None:
        """Chooses the chunks of the next step."""
        decodes, waiting = len(self._decoding), self._window()
        self._plans += 1
        self._shares.passes(now_s)
        old = [seq for seq in waiting if seq.looked_up_step + LOOKUP_EVERY_STEPS < self._plans]
        for seq in old[:LOOKUPS_A_STEP]:
            seq.cached, seq.looked_up_step = self._match(seq).num_tokens, self._plans
        queued = sum(len(seq.tokens) - seq.cached for seq in self._waiting)
        view = SchedulerView(decodes, self._context, len(self._prefilling))
        view.waiting_tokens = sum(seq.missing for seq in self._prefilling)
        if self._plans < self._blocked_until:
            view.blocked_tokens = queued
        else:
            view.waiting += len(self._waiting)
            view.waiting_tokens += queued
        budget = self.policy.begin(view)
        assert budget is not None
        budget.shape = BatchShape.decoding(decodes, self._context + decodes)
        budget.tokens_left -= decodes
        is_open = self._plans >= self._blocked_until
        for seq in self._in_turn(waiting, now_s):
            if budget.tokens_left <= 0:
                break
            if seq.node is None:
                if not is_open or self._computes_prefix_of(seq):
                    continue
                if not self._admit(seq, budget, now_s):
                    is_open = False
                    continue
                if not seq.was_preempted:
                    result.began.append((seq.request, seq.cached))
                    self.prompt_tokens += len(seq.tokens)
                    self.cached_tokens += seq.cached
            self._add_chunk(seq, budget)

    def _window(self) -> list[SimulatedSequence]:
        """The waiting sequences that compete for being next: of each client the first ones."""
        if self._order == "fcfs" or not self._shares.is_contended:
            return self._waiting[:WINDOW_SEQUENCES]
        of_client: dict[ClientShare, list[SimulatedSequence]] = {}
        for seq in self._waiting:
            of_client.setdefault(seq.share, []).append(seq)
        return [seq for queue in of_client.values() for seq in queue[: WINDOW_SEQUENCES // len(of_client)]]

    def _in_turn(self, waiting: list[SimulatedSequence], now_s: float) -> Iterator[SimulatedSequence]:
        """Prefills and waiting sequences in the order in which they may have chunks."""
        if self._order == "fcfs":
            yield from sorted([*self._prefilling, *waiting], key=lambda seq: (not seq.was_preempted, seq.arrived_s))
            return
        ordered = sorted([*self._prefilling, *waiting], key=lambda seq: _urgency(seq, now_s))
        if not self._shares.is_contended:
            yield from ordered
            return
        of_client: dict[ClientShare, list[SimulatedSequence]] = {}
        for seq in ordered:
            of_client.setdefault(seq.share, []).append(seq)
        queues = [(share, iter(queue)) for share, queue in of_client.items()]
        yield from self._shares.order(
            queues,
            lambda seq: (not seq.was_preempted,),
            lambda seq: 0 if seq.node is not None or seq.was_preempted else len(seq.tokens) - seq.cached,
            lambda seq: any(other is seq for other, _ in self._step),
            lambda seq: seq.missing,
        )

    def _add_chunk(self, seq: SimulatedSequence, budget: Budget) -> None:
        room = seq.missing
        most = self._shares.most_prompt_tokens(budget.least_chunk)
        if most is not None and not self._shares.is_quiet(seq.share.tenant):
            room = min(room, most - (budget.shape.tokens - budget.shape.decodes))
        chunk = budget.chunk(seq.computed, seq.missing, room)
        if chunk <= 0:
            return
        assert seq.node is not None
        pages = -(-(seq.computed + chunk) // self.page_size) - seq.computed // self.page_size - seq.own_pages
        if not self._reserve(max(0, pages)):
            return
        seq.own_pages += max(0, pages)
        budget.add(seq.computed, chunk)
        self._step.append((seq, chunk))
        self._shares.computes(seq.share, chunk)

    def _admit(self, seq: SimulatedSequence, budget: Budget, now_s: float) -> bool:
        """Starts a waiting sequence if there are a slot and pages for it and for the outputs to come."""
        if len(self._prefilling) + len(self._decoding) >= MAX_RUNNING:
            self._blocked_until = self._plans + RETRY_STEPS
            return False
        match = self._match(seq)
        seq.cached = match.num_tokens
        if budget.chunk(seq.cached, len(seq.tokens) - seq.cached, 1 << 30) <= 0:
            return False
        self.tree.lock(match.node)
        running = len(self._prefilling) + len(self._decoding)
        to_come = (running + 1) * sum(self._outputs) / len(self._outputs) / 2
        missing = len(seq.tokens) - seq.cached + sum(other.missing for other in self._prefilling)
        if running and (missing + to_come) / self.page_size + running > self._num_available:
            self.tree.unlock(match.node)
            self._blocked_until = self._plans + RETRY_STEPS
            return False
        seq.node, seq.computed = match.node, match.num_tokens
        self._waiting.remove(seq)
        self._shares.starts(seq.share, now_s)
        self._shares.dequeue(seq.share)
        if not seq.was_preempted:
            self._shares.charge(seq.share, len(seq.tokens) - seq.cached)
        self._prefilling.append(seq)
        return True

    def _computes_prefix_of(self, seq: SimulatedSequence) -> bool:
        """Whether a running prefill computes the next page of a waiting sequence, which then waits for that."""
        return any(
            other.computed >= seq.cached
            and common_tokens(seq.request, other.request) >= other.computed + self.page_size
            for other in self._prefilling
        )

    # ------------------------------------------------------------ sequences

    def _begin_decoding(self, seq: SimulatedSequence, result: StepResult) -> None:
        if not seq.produced:
            result.first.append(seq.request)
        seq.produced += 1
        seq.began_round, seq.ends_round = self._round, self._round + seq.request.output_tokens - seq.produced
        self._context += len(seq.tokens)
        if seq.ends_round <= self._round:
            self._finish(seq, result)
        else:
            heappush(self._decoding, (seq.ends_round, next(self._serial), seq))
            self._decodes_of[seq.share] += 1

    def _finish(self, seq: SimulatedSequence, result: StepResult) -> None:
        self._outputs.append(seq.request.output_tokens)
        self._stop_decoding(seq)
        self._shares.close(seq.share)
        self.finished += 1
        self.output_tokens += seq.request.output_tokens
        self.load_due, self._blocked_until = True, 0
        result.last.append(seq.request)

    def _preempt(self) -> None:
        """The sequence that began last gives up its pages and waits."""
        entry = max(self._decoding, key=lambda entry: entry[1])
        self._decoding.remove(entry)
        heapify(self._decoding)
        seq = entry[2]
        self._decodes_of[seq.share] -= 1
        self._stop_decoding(seq)
        seq.was_preempted = True
        seq.cached, seq.computed = seq.computed, 0
        self._waiting.append(seq)
        self._shares.enqueue(seq.share)
        self.preemptions += 1

    def _stop_decoding(self, seq: SimulatedSequence) -> None:
        """Hands the sequence's pages to the tree."""
        decoded = self._round - seq.began_round
        self._context -= len(seq.tokens) + decoded
        self._grown -= decoded
        seq.produced += decoded
        # The last token was never computed.
        whole = token_ids((*seq.request.spans, seq.request.answer))
        seq.tokens = whole[: seq.request.prompt_tokens + seq.produced - 1]
        seq.computed = len(seq.tokens)
        self._cache_prefix(seq)
        assert seq.node is not None
        self.tree.unlock(seq.node)
        self._own_pages -= seq.own_pages
        seq.node, seq.own_pages = None, 0

    # ------------------------------------------------------------ pages

    @property
    def _num_owned(self) -> int:
        """Pages that sequences own. The pool has them among its free ones."""
        return self._own_pages + -(-self._grown // self.page_size)

    @property
    def _num_available(self) -> int:
        return self.pool.num_free - self._num_owned + self.tree.num_evictable

    def _match(self, seq: SimulatedSequence) -> Match:
        return self.tree.match(seq.tokens[:-1])

    def _reserve(self, num_pages: int) -> bool:
        """Makes `num_pages` pages the property of a sequence."""
        if num_pages > self._num_available:
            return False
        missing = num_pages - (self.pool.num_free - self._num_owned)
        if missing > 0:
            self.tree.evict(missing)
        self._own_pages += num_pages
        return True

    def _make_room_to_decode(self) -> None:
        """Evicts, then preempts, until the decodes of the steps to come have pages."""
        while len(self._decoding) > 1 and self._num_available < len(self._decoding):
            self._preempt()
        missing = len(self._decoding) + self._num_owned - self.pool.num_free
        if missing > 0:
            self.tree.evict(missing)

    def _cache_prefix(self, seq: SimulatedSequence) -> None:
        """Hands the computed whole pages of a sequence to the tree, and locks them there."""
        whole = seq.computed // self.page_size * self.page_size
        match = self.tree.match(seq.tokens[:whole])
        self._own_pages -= seq.own_pages
        seq.own_pages = min(seq.own_pages, -(-(seq.computed - whole) // self.page_size))
        self._own_pages += seq.own_pages
        node, new = match.node, whole // self.page_size - len(match.pages)
        if new > 0:
            pages = self.pool.allocate(min(new, self.pool.num_free))
            assert pages is not None
            pages = np.concatenate([match.pages, pages])
            node = self.tree.insert(seq.tokens[: len(pages) * self.page_size], pages).node
        self.tree.lock(node)
        assert seq.node is not None
        self.tree.unlock(seq.node)
        seq.node = node


def _stretch_s(first_s: float, growth_s: float, steps: int) -> float:
    """Seconds of steps of which the first takes `first_s` and each other one `growth_s` more than the one before."""
    return steps * first_s + growth_s * steps * (steps - 1) / 2


def _urgency(seq: SimulatedSequence, now_s: float) -> tuple[bool, bool, float]:
    """Sort key, ascending, as `worker.scheduler.waiting_queue` has it."""
    starved = seq.was_preempted or now_s - seq.arrived_s > STARVATION_S
    missing = seq.missing if seq.node is not None else len(seq.tokens) - seq.cached
    return not seq.was_preempted, not starved, seq.arrived_s if starved else missing + AGEING_TOKENS_S * seq.arrived_s
