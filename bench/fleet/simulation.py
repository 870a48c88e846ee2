"""A fleet in virtual time: routers place requests on simulated replicas, and hear of caches and loads with a delay.

    client ─▶ router (a placement rule) ── HOP_S ─▶ replica: steps that take what the cost model says
                     ▲                                 │
                     └── HOP_S: cache events, load, first and last tokens, at the end of steps
    router ── HOP_S ─▶ all other routers: its bookings

    outcome = simulate(requests, rules, replicas)
    outcome.slowdown(0.99), outcome.hit_rate, outcome.replicas_used

For each request the simulation also knows what a single cache of all replicas' pages would have had of its prompt
(`one_cache.py`). Its time alone is that on an idle replica which has just that cached.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from bench.fleet.hardware import ReplicaHardware
from bench.fleet.one_cache import OneCache
from bench.fleet.replica import PUBLISH_EVERY_S, FleetReplica, StepResult
from bench.fleet.workloads import FleetRequest, chain, token_ids
from worker.messages import CacheEvents, ReplicaLoad

HOP_S = 0.0005  # a message between router and replica
SAMPLE_S = 0.25  # how often held tokens are sampled
WARM_UP = 1 / 3  # fraction of the requests that come first and are not measured


class Placed(NamedTuple):
    """A decision: the replica's index, and the number of the booking there (0: the rule does not number them)."""

    replica: int
    booking: int = 0


class PlacementRule(Protocol):
    """The placement of one router, as the simulation drives it. Replicas are known by their indices."""

    def place(self, request: FleetRequest, tokens: np.ndarray, now_s: float) -> Placed:
        """Chooses the replica for a request. `tokens`: its prompt, int32 [n]."""

    def news(self) -> Sequence[Any]:
        """News for the other routers, since the last call."""

    def hear(self, news: Sequence[Any], now_s: float) -> None:
        """Hears the news of another router."""

    def apply_events(self, replica: int, events: CacheEvents) -> None:
        """Hears of changes in a replica's cache."""

    def apply_load(self, replica: int, load: ReplicaLoad) -> None:
        """Hears of a replica's load."""

    def first_token(self, request: FleetRequest) -> None:
        """A request of this router got its first token."""

    def ended(self, request: FleetRequest) -> None:
        """A request of this router got its last token."""


@dataclass
class FleetOutcome:
    """The outcome of a simulation; arrays have one entry for each request, by number.

    | field | meaning |
    | --- | --- |
    | `arrived_s`, `first_s`, `last_s` | times of arrival, first and last token |
    | `prompt`, `output` | tokens |
    | `cached` | prompt tokens that were cached on the replica |
    | `ideal` | prompt tokens that one cache of all pages would have had |
    | `alone_s` | time to first token alone |
    | `replica` | index of the replica |
    | `measured` | bool, whether the request came after the warm-up |
    | `held` | [samples, replicas]: tokens that each replica held, waiting ones included |
    """

    arrived_s: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    cached: np.ndarray
    ideal: np.ndarray
    alone_s: np.ndarray
    replica: np.ndarray
    measured: np.ndarray
    held: np.ndarray
    num_replicas: int
    preemptions: int

    def slowdown(self, q: float) -> float:
        """A quantile of TTFT over TTFT alone."""
        return float(np.quantile(((self.first_s - self.arrived_s) / self.alone_s)[self.measured], q))

    def ttft_s(self, q: float) -> float:
        return float(np.quantile((self.first_s - self.arrived_s)[self.measured], q))

    def tpot_s(self, q: float) -> float:
        """A quantile of the mean time between two tokens of a request."""
        chosen = self.measured & (self.output > 1)
        return float(np.quantile(((self.last_s - self.first_s) / (self.output - 1).clip(1))[chosen], q))

    @property
    def hit_rate(self) -> float:
        return float(self.cached[self.measured].sum() / self.prompt[self.measured].sum())

    @property
    def ideal_hit_rate(self) -> float:
        return float(self.ideal[self.measured].sum() / self.prompt[self.measured].sum())

    @property
    def imbalance(self) -> float:
        """Largest mean of the tokens held by a replica, divided by the mean of all."""
        means = self.held.mean(axis=0)
        return float(means.max() / means.mean()) if means.any() else 1.0

    @property
    def replicas_used(self) -> float:
        """Fraction of the replicas that got a measured request."""
        return len(np.unique(self.replica[self.measured])) / self.num_replicas

    def summary(self) -> dict[str, float]:
        """The figures of a run."""
        return {
            "slowdown_p50": self.slowdown(0.5),
            "slowdown_p99": self.slowdown(0.99),
            "ttft_p50_s": self.ttft_s(0.5),
            "ttft_p99_s": self.ttft_s(0.99),
            "tpot_p50_s": self.tpot_s(0.5),
            "tpot_p99_s": self.tpot_s(0.99),
            "hit_rate": self.hit_rate,
            "ideal_hit_rate": self.ideal_hit_rate,
            "imbalance": self.imbalance,
            "replicas_used": self.replicas_used,
            "requests": len(self.prompt),
            "measured": int(self.measured.sum()),
            "seconds": float(self.last_s.max()),
            "preemptions": self.preemptions,
        }


ARRIVAL, DELIVERY, STEP_END, NEWS, PEERS, SAMPLE, CALL = range(7)  # CALL: a function, without arguments


class FleetSimulation:
    """A run. `rules`: one for each router; a request goes to a random one. `order`: as in `FleetReplica`."""

    def __init__(
        self,
        requests: Sequence[FleetRequest],
        rules: Sequence[PlacementRule],
        hardware: Sequence[ReplicaHardware],
        seed: int = 0,
        order: Literal["fair", "fcfs"] = "fair",
    ) -> None:
        self._requests, self._rules, self._hardware = requests, rules, hardware
        self._replicas = [FleetReplica(kind, len(rules), order) for kind in hardware]
        self._random = np.random.default_rng(seed)
        self._one_cache = OneCache(sum(kind.num_pages for kind in hardware), hardware[0].page_size)
        self._queue: list[tuple[float, int, int, Any]] = []
        self._pushed = 0
        self._router: dict[int, int] = {}  # of each request in flight, by number
        number = 1 + max(request.number for request in chain(requests))
        columns = "arrived_s first_s last_s prompt output cached ideal alone_s replica".split()
        self._rows = {name: np.full(number, np.nan) for name in columns}
        self._held: list[list[int]] = []
        self._in_flight = len(requests)
        self.now_s = 0.0

    def run(self) -> FleetOutcome:
        """Serves all requests to their ends."""
        for request in self._requests:
            self._push(request.at_s, ARRIVAL, request)
        self._push(SAMPLE_S, SAMPLE, None)
        while self._in_flight:
            self.now_s, _, kind, what = heapq.heappop(self._queue)
            if kind == ARRIVAL:
                self._arrive(what)
            elif kind == DELIVERY:
                replica, request, tokens, router, booking = what
                result = self._replicas[replica].take(request, tokens, self.now_s, router, booking)
                self._go_on(replica, result)
            elif kind == STEP_END:
                if self._replicas[what].busy_until_s == self.now_s:
                    self._go_on(what, self._replicas[what].end_step(self.now_s), step_ended=True)
            elif kind == NEWS:
                self._tell(*what)
            elif kind == PEERS:
                router, news = what
                for other, rule in enumerate(self._rules):
                    if other != router:
                        rule.hear(news, self.now_s)
            elif kind == CALL:
                what()
            else:
                self._held.append([replica.held_tokens for replica in self._replicas])
                self._push(self.now_s + SAMPLE_S, SAMPLE, None)
        return self._outcome()

    def _push(self, at_s: float, kind: int, what: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (at_s, self._pushed, kind, what))

    def _arrive(self, request: FleetRequest) -> None:
        tokens, rows, number = token_ids(request.spans), self._rows, request.number
        router = int(self._random.integers(len(self._rules)))
        ideal = self._one_cache.use(tokens)
        rows["arrived_s"][number], rows["prompt"][number] = self.now_s, len(tokens)
        rows["output"][number], rows["ideal"][number] = request.output_tokens, ideal
        rows["alone_s"][number] = self._hardware[0].alone_s(len(tokens) - ideal, ideal) + 2 * HOP_S
        replica, booking = self._rules[router].place(request, tokens, self.now_s)
        rows["replica"][number] = replica
        self._router[number] = router
        if len(self._rules) > 1 and (news := self._rules[router].news()):
            self._push(self.now_s + HOP_S, PEERS, (router, news))
        self._push(self.now_s + HOP_S, DELIVERY, (replica, request, tokens, router, booking))

    def _go_on(self, index: int, result: StepResult, step_ended: bool = False) -> None:
        """A replica runs its next step, and tells its routers what it has to tell: after a step, or when it was idle as
        the request came."""
        replica = self._replicas[index]
        if replica.busy_until_s < np.inf:
            self._push(replica.busy_until_s, STEP_END, index)
        for request, cached in result.began:
            self._rows["cached"][request.number] = cached
        if not step_ended and not result.began:
            return
        events, load = replica.cache_events(), None
        if replica.load_due or self.now_s - replica.published_s >= PUBLISH_EVERY_S:
            load, replica.load_due, replica.published_s = replica.load(), False, self.now_s
        if events is not None or load is not None or result.first or result.last:
            self._push(self.now_s + HOP_S, NEWS, (index, events, load, tuple(replica.seen), result))

    def _tell(
        self,
        index: int,
        events: CacheEvents | None,
        load: ReplicaLoad | None,
        seen: tuple[int, ...],
        result: StepResult,
    ) -> None:
        """The news of a replica reach all routers, and its tokens their clients."""
        for request in result.first:
            self._rows["first_s"][request.number] = self.now_s
            self._rules[self._router[request.number]].first_token(request)
        for request in result.last:
            self._rows["last_s"][request.number] = self.now_s
            self._rules[self._router.pop(request.number)].ended(request)
            self._one_cache.use(token_ids((*request.spans, request.answer)))
            if request.then is not None:
                self._push(self.now_s + request.then.at_s, ARRIVAL, request.then)
            else:
                self._in_flight -= 1
        if load is not None:
            load.peers_seen = {str(router): number for router, number in enumerate(seen)}
        for router, rule in enumerate(self._rules):
            if events is not None:
                rule.apply_events(index, events)
            if load is not None:
                load.bookings_seen = seen[router]
                rule.apply_load(index, load)

    def _outcome(self) -> FleetOutcome:
        rows = self._rows
        begin_s = np.quantile(rows["arrived_s"], WARM_UP)
        preemptions = sum(replica.preemptions for replica in self._replicas)
        held = np.array(self._held)
        return FleetOutcome(
            **rows,
            measured=rows["arrived_s"] >= begin_s,
            held=held[len(held) // 3 :],
            num_replicas=len(self._replicas),
            preemptions=preemptions,
        )
