"""The death of a replica in a simulated fleet: the pace of its streams elsewhere, and the others' time between tokens.

The router's own `ResumePace` decides when each stream goes on; it runs in an event loop that knows virtual time only.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.fleet.capacity import capacity
from bench.fleet.hardware import ReplicaHardware
from bench.fleet.replica import FleetReplica, SimulatedSequence, StepResult
from bench.fleet.shoal_router import ShoalRule
from bench.fleet.simulation import CALL, DELIVERY, HOP_S, FleetSimulation
from bench.fleet.workloads import TURN, FleetRequest, at_rate, token_ids, zipf
from bench.load.workload import TokenSpan
from bench.results import Figure
from router.fleet.resume_pace import ResumePace
from worker.messages import CacheEvents, ReplicaLoad

DEAD = 0  # the replica that dies
DEATH = 0.7  # of the time until the last request
REQUESTS = 100  # for each replica
RATIOS = ("tbt_p99_vs_before", "tbt_mean_vs_before")
TURNS = 8  # of the event loop, until every stream that may go on has done so


@dataclass(frozen=True)
class Death:
    """The outcome. Times between tokens in seconds, of all replicas but the dead one: `before` its death, and `after`
    it, until each of the `resumed` streams has its next token: for `took_s`.
    """

    before: np.ndarray
    after: np.ndarray
    resumed: int
    took_s: float

    def ratio(self, q: float) -> float:
        """A quantile of the time between tokens after the death, divided by that before it."""
        return float(np.quantile(self.after, q) / np.quantile(self.before, q))


def deaths(levels: Sequence[float], num_replicas: int, hardware: ReplicaHardware, seed: int) -> dict[str, Any]:
    """The figures of each level, a fraction of the capacity that the fleet has before: with the router's pace, and
    where all lost streams go on at once."""
    requests = zipf(np.random.default_rng(seed), REQUESTS * num_replicas, num_replicas)
    rate_s = capacity(requests, hardware, num_replicas)
    runs: dict[str, Any] = {}
    for level in levels:
        timed = at_rate(requests, level * rate_s)
        death_s = DEATH * timed[-1].at_s
        for name, is_paced in (("paced", True), ("at_once", False)):
            death = DeathSimulation(timed, hardware, num_replicas, death_s, is_paced, seed).death()
            runs.setdefault(f"{level:g}", {})[name] = {
                "tbt_p99_vs_before": death.ratio(0.99),
                "tbt_mean_vs_before": float(death.after.mean() / death.before.mean()),
                "tbt_p99_before_s": float(np.quantile(death.before, 0.99)),
                "resumed": death.resumed,
                "took_s": death.took_s,
            }
    return runs


def figures(runs: dict[str, Any]) -> list[Figure]:
    """The figures of the router's pace: the worst of all levels, and each level's."""
    made = [
        Figure(f"fleet.death.{name}", max(by_pace["paced"][name] for by_pace in runs.values()), "ratio", False)
        for name in RATIOS
    ]
    for level, by_pace in runs.items():
        base = f"fleet.death.{float(level):.0%}".rstrip("%")
        made += [Figure(f"{base}.{name}", by_pace["paced"][name], "ratio", False) for name in RATIOS]
        made.append(Figure(f"{base}.took_s", by_pace["paced"]["took_s"], "s", False))
    return made


class TimedReplica(FleetReplica):
    """A replica that keeps its steps: their ends, seconds and number of decodes."""

    def __init__(self, hardware: ReplicaHardware) -> None:
        super().__init__(hardware)
        self.steps: list[tuple[float, float, int]] = []
        self._began_s = 0.0

    def end_step(self, now_s: float) -> StepResult:
        if self._stretch is not None:
            _, first_s, growth_s, count = self._stretch
            durations = [first_s + growth_s * number for number in range(count)]
        else:
            durations = [now_s - self._began_s]
        decodes = len(self._decoding)
        self.steps += [(now_s, seconds, decodes) for seconds in durations if decodes]
        return super().end_step(now_s)

    def _begin(self, now_s: float, result: StepResult) -> None:
        self._began_s = now_s
        super()._begin(now_s, result)

    def streams(self) -> list[tuple[FleetRequest, int]]:
        """The requests here, and how many output tokens each has."""
        entries: list[SimulatedSequence] = [*self._waiting, *self._prefilling]
        made = [(seq.request, seq.produced) for seq in entries]
        made += [(seq.request, seq.produced + self._round - seq.began_round) for _, _, seq in self._decoding]
        return made


class DeathSimulation(FleetSimulation):
    """A fleet with one router, of which the replica `DEAD` dies at `death_s`. `is_paced`: otherwise all of its streams
    go on at once."""

    def __init__(
        self,
        requests: Sequence[FleetRequest],
        hardware: ReplicaHardware,
        num_replicas: int,
        death_s: float,
        is_paced: bool = True,
        seed: int = 0,
    ) -> None:
        self._rule = ShoalRule(num_replicas, seed=seed)
        super().__init__(requests, [self._rule], [hardware] * num_replicas, seed)
        self._timed = [TimedReplica(hardware) for _ in range(num_replicas)]
        self._replicas[:] = self._timed
        self._death_s, self._is_paced = death_s, is_paced
        self._loop = asyncio.new_event_loop()
        fleet = self._rule.fleet
        self._pace = ResumePace(fleet.resume_rate, lambda: self.now_s, self._sleep)
        self._tasks: list[asyncio.Task[None]] = []
        self._without_token: set[int] = set()  # numbers of lost streams that have had no token since
        self._again_s = death_s  # when the last of them had one

    def death(self) -> Death:
        """Runs the simulation."""
        self._push(self._death_s, CALL, self._die)
        try:
            outcome = self.run()
        finally:
            self._loop.close()
        others = [self._timed[index].steps for index in range(len(self._timed)) if index != DEAD]
        steps = np.array([step for each in others for step in each])
        end_s, step_s, decodes = steps.T
        begun_s = np.quantile(outcome.arrived_s, 1 / 3)
        before = (end_s > begun_s) & (end_s <= self._death_s)
        after = (end_s > self._death_s) & (end_s <= self._again_s)
        count = decodes.astype(int)
        return Death(
            before=np.repeat(step_s[before], count[before]),
            after=np.repeat(step_s[after], count[after]),
            resumed=len(self._tasks),
            took_s=float(self._again_s - self._death_s),
        )

    # ------------------------------------------------------------ the death

    def _die(self) -> None:
        dead = self._timed[DEAD]
        dead.busy_until_s = np.inf
        self._rule.leave(DEAD)
        for request, produced in dead.streams():
            self._lose(request, produced)
        for entry in [entry for entry in self._queue if entry[2] == DELIVERY and entry[3][0] == DEAD]:
            self._queue.remove(entry)
            self._lose(entry[3][1], 0)
        self._queue.sort()  # a heap again
        self._settle()

    def _lose(self, request: FleetRequest, produced: int) -> None:
        self._rule.ended(request)
        self._without_token.add(request.number)
        spans = (*request.spans, TokenSpan((TURN, request.number), produced))
        left = replace(request, spans=spans, output_tokens=max(1, request.output_tokens - produced))
        self._tasks.append(self._loop.create_task(self._go_on_elsewhere(left)))

    async def _go_on_elsewhere(self, request: FleetRequest) -> None:
        tokens = token_ids(request.spans)
        if self._is_paced:
            await self._pace.turn(self._rule.fleet.prompt_s(tokens.tolist()))
        replica, booking = self._rule.place(request, tokens, self.now_s)
        self._push(self.now_s + HOP_S, DELIVERY, (replica, request, tokens, 0, booking))

    async def _sleep(self, seconds: float) -> None:
        over = self._loop.create_future()

        def wake() -> None:
            over.set_result(None)
            self._settle()

        self._push(self.now_s + seconds, CALL, wake)
        await over

    def _settle(self) -> None:
        """Runs the event loop until nothing can go on before a later time."""

        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self._loop.run_until_complete(turns())

    def _tell(
        self,
        index: int,
        events: CacheEvents | None,
        load: ReplicaLoad | None,
        seen: tuple[int, ...],
        result: StepResult,
    ) -> None:
        if self.now_s >= self._death_s and index == DEAD:
            return
        for request in (*result.first, *result.last):
            if request.number in self._without_token:
                self._without_token.remove(request.number)
                self._again_s = self.now_s
        super()._tell(index, events, load, seen, result)
