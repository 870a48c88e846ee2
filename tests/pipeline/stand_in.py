"""A scheduler that only counts, in place of the worker's: first come first served, room for all that a request will
ever hold, nothing cached."""

from collections import deque

import numpy as np

from pipeline.ahead import Ahead
from pipeline.budget import Budget
from pipeline.cost import CostModel
from pipeline.policy import Policy, View
from pipeline.shape import BatchShape
from pipeline.simulate import Clock, MicroBatch, Request


class Sequence:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.computed = 0
        self.produced = 0
        self.chunks_under_way = 0
        self.ready_s = 0.0

    @property
    def missing(self) -> int:
        """Of the prompt."""
        return self.request.prompt - self.computed


class StandIn:
    """Follows `pipeline/simulate.py`'s Replica. `models` learn from every micro-batch."""

    def __init__(
        self, policy: Policy, clock: Clock, kv_tokens: int, models: list[CostModel], slots: int = 1024
    ) -> None:
        self.policy, self.clock, self.models, self.slots = policy, clock, models, slots
        self.kv_tokens = self.kv_free = kv_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.ready: deque[Sequence] = deque()  # longest ready first
        self.in_flight: deque[tuple[BatchShape, list[tuple[Sequence, int]], float]] = deque()
        self.waiting_tokens = 0  # of `waiting`
        self.running = self.decoding = self.decoding_context = 0
        self.ahead = Ahead()
        self.nothing = False

    # ------------------------------------------------------------ the simulator's side

    def arrive(self, request: Request) -> None:
        self.waiting.append(Sequence(request))
        self.waiting_tokens += request.prompt

    def schedule(self) -> MicroBatch | None:
        view = self.view()
        budget = self.policy.begin(view)
        self.nothing = False
        if budget is None:
            return None
        chosen, started = self.choose(budget)
        if not chosen and self.ready and view.waiting_tokens:
            view.waiting_tokens = view.waiting = 0
            budget = self.policy.begin(view)
            assert budget is not None
            chosen, started = self.choose(budget)
        if not chosen:
            self.nothing = True
            return None
        shape = budget.shape
        assert shape.tokens == sum(size for _, size in chosen)
        longest = min((seq.ready_s for seq, _ in chosen if seq.produced), default=self.clock())
        self.in_flight.append((shape, chosen, longest))
        if self.models:
            self.ahead.sent(self.clock(), self.models[0].predict(shape))
        return MicroBatch(shape, started)

    def ask_again_s(self) -> float:
        return self.policy.ask_again_s(self.view())

    def found_nothing(self) -> str | None:
        if not self.nothing:
            return None
        work = self.decoding >= self.policy.settings.stages or self.prefilling or self.admissible()
        return "clumped" if work else "nothing_to_do"

    def first_stage_ended(self) -> None:
        if self.models:
            self.ahead.ended(self.clock())

    def finish(self, batch: MicroBatch, seconds: list[float]) -> list[int]:
        shape, chosen, longest = self.in_flight.popleft()
        assert shape is batch.shape
        for model, measured in zip(self.models, seconds, strict=False):
            model.observe(shape, measured)
        if shape.decodes:
            self.policy.finished(self.clock() - longest)
        got = []
        for seq, _ in chosen:
            decode = seq.produced > 0
            seq.chunks_under_way -= not decode
            if not decode and (seq.missing or seq.chunks_under_way):
                continue
            seq.produced += 1
            got.append(seq.request.number)
            self.decoding_context += decode
            if seq.produced == seq.request.output:
                self.decoding -= 1
                self.decoding_context -= seq.computed
                self.kv_free += seq.request.prompt + seq.request.output
                self.running -= 1
            else:
                seq.ready_s = self.clock()
                self.ready.append(seq)
        return got

    def decode_s(self, shape: BatchShape) -> float:
        if not self.models:
            return 0.0
        cost = self.models[-1].coefficients
        return cost.decode * shape.decodes + cost.decode_context * shape.decode_context

    # ------------------------------------------------------------ choosing

    def admissible(self) -> bool:
        if not self.waiting or self.running >= self.slots:
            return False
        request = self.waiting[0].request
        return request.prompt + request.output <= self.kv_free

    def view(self) -> View:
        waiting, tokens = len(self.prefilling), sum(seq.missing for seq in self.prefilling)
        if self.admissible():
            waiting, tokens = waiting + len(self.waiting), tokens + self.waiting_tokens
        return View(
            self.decoding,
            self.decoding_context,
            waiting,
            tokens,
            self.kv_free / self.kv_tokens,
            0 if self.admissible() else self.waiting_tokens,
            [shape for shape, _, _ in self.in_flight],
            self.ahead.seconds(self.clock()),
        )

    def choose(self, budget: Budget) -> tuple[list[tuple[Sequence, int]], list[int]]:
        taken = budget.take_decodes(np.array([seq.computed for seq in self.ready], dtype=np.int64))
        chosen = [(self.ready.popleft(), 1) for _ in range(taken)]
        for seq, _ in chosen:
            seq.computed += 1
        started: list[int] = []
        for seq in list(self.prefilling):
            if not self.policy.chunks_follow and seq.chunks_under_way:
                continue
            if not self.take(seq, budget, chosen):
                return chosen, started
        while self.admissible() and not any(seq.missing and self.policy.chunks_follow for seq in self.prefilling):
            seq = self.waiting[0]
            self.prefilling.append(seq)
            if not self.take(seq, budget, chosen):
                self.prefilling.remove(seq)
                break
            self.waiting.popleft()
            self.waiting_tokens -= seq.request.prompt
            self.kv_free -= seq.request.prompt + seq.request.output
            self.running += 1
            started.append(seq.request.number)
        return chosen, started

    def take(self, seq: Sequence, budget: Budget, chosen: list[tuple[Sequence, int]]) -> bool:
        size = budget.chunk(seq.computed, seq.missing, seq.missing)
        if size == 0:
            return False
        budget.add(seq.computed, size)
        chosen.append((seq, size))
        seq.computed += size
        seq.chunks_under_way += 1
        if not seq.missing:
            self.prefilling.remove(seq)
            self.decoding += 1
            self.decoding_context += seq.computed
        return True
