"""When streams go on that have lost their replica, by a clock that only the test moves."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from radix.events import Stored
from radix.node import pack
from router.fleet.fleet import Fleet
from router.fleet.resume_pace import SHARE, ResumePace
from worker.messages import CacheEvents, ReplicaLoad, StepCosts

COSTS = StepCosts(token_s=1e-3, product_s=1e-6)


class Scripted:
    """A clock that moves on when the pace sleeps, and what went on when."""

    def __init__(self, rate: Callable[[float], float]) -> None:
        self.now_s = 0.0
        self.went_on: list[tuple[float, float]] = []  # when, and the seconds of its prompt
        self.pace = ResumePace(lambda: rate(self.now_s), lambda: self.now_s, self._sleep)

    async def _sleep(self, seconds: float) -> None:
        for _ in range(5):  # a stream that has its turn notes the time
            await asyncio.sleep(0)
        self.now_s += seconds

    async def stream(self, prompt_s: float) -> None:
        await self.pace.turn(prompt_s)
        self.went_on.append((self.now_s, prompt_s))


def resumed(prompts_s: Sequence[float], rate: Callable[[float], float]) -> list[tuple[float, float]]:
    """When streams of one replica go on that were lost at time 0."""

    async def run() -> list[tuple[float, float]]:
        scripted = Scripted(rate)
        await asyncio.wait_for(asyncio.gather(*map(scripted.stream, prompts_s)), 20)
        assert scripted.pace.waiting == 0
        return scripted.went_on

    return asyncio.run(run())


def test_quick_ones_go_first_each_when_the_time_of_those_before_it_has_passed() -> None:
    assert resumed([0.4, 0.1, 0.2], lambda now_s: 0.5) == [
        (0.0, 0.1),
        (pytest.approx(0.2), 0.2),
        (pytest.approx(0.6), 0.4),
    ]


@pytest.mark.parametrize("replicas", [1, 7])
def test_resumed_prompts_take_their_share_of_the_time_and_all_of_it(replicas: int) -> None:
    """In any stretch of time, at most the share, and one prompt; in all of it, no less."""
    rate = replicas * SHARE
    prompts_s = [0.02 + 0.01 * (number * 7919 % 31) for number in range(256)]
    went_on = resumed(prompts_s, lambda now_s: rate)
    assert [prompt_s for _, prompt_s in went_on] == sorted(prompts_s)
    for first, (begin_s, _) in enumerate(went_on):
        work_s = 0.0
        for end_s, prompt_s in went_on[first:]:
            assert work_s <= (end_s - begin_s) * rate + 1e-9
            work_s += prompt_s
    assert went_on[-1][0] == pytest.approx((sum(prompts_s) - went_on[-1][1]) / rate)


def test_without_a_replica_nobody_waits_here_and_one_that_comes_counts_at_once() -> None:
    assert resumed([1.0] * 3, lambda now_s: 0.0) == [(0.0, 1.0)] * 3
    times = [when for when, _ in resumed([1.0] * 5, lambda now_s: 0.5 if now_s < 3 else 2.0)]
    assert times == pytest.approx([0.0, 2.0, 4.0, 4.5, 5.0])


def test_a_long_prompt_does_not_wait_for_ever() -> None:
    async def run() -> None:
        scripted = Scripted(lambda now_s: 0.5)
        long = asyncio.create_task(scripted.stream(2.0))
        others = []
        while not long.done():  # there is always a quick one
            others.append(asyncio.create_task(scripted.stream(0.1)))
            await asyncio.sleep(0)
            assert scripted.now_s < 40
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await scripted.pace.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_client_that_has_gone_takes_nobodys_turn() -> None:
    async def run() -> None:
        scripted = Scripted(lambda now_s: 0.5)
        first, gone, last = (asyncio.create_task(scripted.stream(seconds)) for seconds in (0.1, 0.2, 0.3))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(first, gone, last, return_exceptions=True)
        assert scripted.went_on == [(0.0, 0.1), (pytest.approx(0.2), 0.3)]

    asyncio.run(asyncio.wait_for(run(), 20))


def fleet_of(**running: int) -> Fleet:
    """Replicas by name, with so many requests that run."""
    fleet = Fleet()
    for name, number in running.items():
        fleet.join(name)
        fleet.apply_load(name, ReplicaLoad(incarnation="one", running=number, costs=COSTS))
    return fleet


def test_a_prompt_takes_what_is_not_cached_where_most_of_it_is() -> None:
    fleet = fleet_of(a=1, b=1)
    prompt = list(range(1000))
    assert fleet.prompt_s(prompt) == pytest.approx(1.0 + 0.5)
    fleet.apply_events("b", CacheEvents("one", 1, [Stored(1, 0, pack(prompt[:800]))], 16, piece=0))
    assert fleet.prompt_s(prompt) == pytest.approx(0.2 + (1.0 - 0.64) / 2)
    assert fleet.prompt_s(prompt, exclude={"b"}) == pytest.approx(1.5)
    assert fleet.prompt_s(prompt, exclude={"a", "b"}) == Fleet().prompt_s(prompt) == 0.0


def test_an_idle_replica_has_all_its_time_for_resumed_prompts() -> None:
    fleet = fleet_of(a=3, b=0, c=1)
    assert fleet.resume_rate() == 1 + 2 * SHARE
    assert fleet.resume_rate({"b"}) == 2 * SHARE
    assert Fleet().resume_rate() == 0.0
