"""Clients that try to keep others from their shares, and sequences that have no room, in virtual time."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.worker.driver import prompt
from tests.worker.virtual_replica import STEP_S, VirtualReplica
from worker.messages import SamplingParams
from worker.scheduler.fair_share import CREDIT_TOKENS

Attack = Callable[[VirtualReplica, random.Random, int], None]


def served_before(replica: VirtualReplica, client: str, tokens: int) -> None:
    """A client alone is served so many prompt tokens."""
    for _ in range(tokens // 1000):
        replica.send(client, 1000, 1)
    while replica.scheduler.has_work:
        replica.step()


def chat(replica: VirtualReplica, seconds: float, client: str = "victim", **fields) -> list[float]:
    """A request of four tokens each half second. Returns their waits."""
    for _ in range(int(2 * seconds)):
        replica.send(client, 30, fields.get("max_tokens", 4), **{k: v for k, v in fields.items() if k != "max_tokens"})
        replica.run(0.5)
    return replica.waits_s(client)[-int(2 * seconds) :]


# ---------------------------------------------------------------- a sequence without room


@pytest.mark.parametrize("used", [0, 25_000])
@pytest.mark.parametrize(("kv_tokens", "count"), [(13_232, 4), (13_232, 64), (40_000, 8), (100_000, 30)])
def test_large_sequences_of_one_client_do_not_stop_the_others(kv_tokens: int, count: int, used: int) -> None:
    replica = VirtualReplica(kv_tokens)
    served_before(replica, "victim", used)
    for _ in range(count):
        replica.send("attacker", 20, 8000)
    replica.run(0.5)
    waits = chat(replica, 20)
    assert max(waits) < 1.5 and sorted(waits)[len(waits) // 2] < 0.2


@pytest.mark.parametrize("ends", [None, 60])
def test_nor_do_those_who_fill_all_slots(ends: int | None) -> None:
    """The victim's requests may be long by their limits."""
    replica = VirtualReplica(400_000, max_running=32)
    served_before(replica, "victim", 25_000)
    for _ in range(80):
        replica.send("attacker", 20, 8000)
    replica.run(1.0)
    long = {"max_tokens": 4000, "ends": ends} if ends else {}
    waits = chat(replica, 12, **long)
    assert max(waits) < 2.5 and sorted(waits)[len(waits) // 2] < 0.5
    assert len(replica.scheduler.running) == 32  # and nothing is held back


@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize(("prompt", "tokens", "count"), [(20, 400, 64), (20, 8000, 64), (100, 100, 300)])
def test_who_holds_little_waits_for_nothing(prompt: int, tokens: int, count: int, streams: int) -> None:
    """From the first step of a client that fills all slots, though that client has asked for nothing before."""
    replica = VirtualReplica(400_000, max_running=32)
    served_before(replica, "victim", 25_000)
    for _ in range(streams):
        replica.send("victim", 20, 4000)
    waits = []
    for _ in range(10):
        while replica.num_live("attacker") < count:
            replica.send("attacker", prompt, tokens)
        replica.run(0.5)
        waits += chat(replica, 0.5)
    assert max(waits) <= 8 * STEP_S
    assert len(replica.scheduler.running) == 32


def test_users_of_one_client_do_not_fill_its_slots_for_each_other() -> None:
    replica = VirtualReplica(400_000, max_running=16)
    for _ in range(40):
        replica.send("app", 20, 8000, user="greedy")
    replica.run(1.0)
    replica.send("app", 30, 4, user="quiet")
    replica.run(2.0)
    assert replica.num_live("app") == 40


def test_many_users_with_large_sequences_do_not_close_the_step() -> None:
    replica = VirtualReplica(13_232)
    served_before(replica, "victim", 25_000)
    for number in range(100):
        replica.send("attacker", 20, 8000, user=f"user {number}")
    replica.run(0.5)
    assert max(chat(replica, 10)) < 1.5


def test_a_large_sequence_does_not_starve_behind_small_ones() -> None:
    """It needs nearly all pages, and the others would fill them for ever."""
    replica = VirtualReplica(8_000)
    for _ in range(60):
        replica.send("many", 100, 100)
    replica.run(3.0)
    large = replica.send("large", 6_000, 200)
    while large not in replica.first_s and replica.now_s < 120:
        while replica.num_live("many") < 60:
            replica.send("many", 100, 100)
        replica.step()
    assert replica.first_s[large] - replica.sent_s[large] < 30


def of_short_outputs() -> VirtualReplica:
    """A replica that has learned that outputs are far shorter than their limits."""
    replica = VirtualReplica(8_000, max_running=16)
    for _ in range(200):
        replica.send("many", 50, 4000, ends=20)
    while replica.scheduler.has_work:
        replica.step()
    return replica


def test_nor_behind_those_that_take_longer_than_expected() -> None:
    """The limits of the others tell nothing, and they are ten times as long as they have been."""
    replica = of_short_outputs()
    for _ in range(20):
        replica.send("many", 50, 4000, ends=400)
    replica.run(1.0)
    large = replica.send("large", 6_000, 200)
    begun_s = replica.now_s
    while large not in replica.first_s and replica.now_s < begun_s + 300:
        while replica.num_live("many") < 20:
            replica.send("many", 50, 4000, ends=400)
        replica.step()
    assert replica.first_s[large] - replica.sent_s[large] < 40


def test_an_overtaker_that_does_not_end_in_time_gives_way() -> None:
    """Outputs were short so far, so those that overtake are expected to be."""
    replica = of_short_outputs()
    early = replica.send("early", 3_000, 300)
    replica.run(0.5)
    large = replica.send("large", 6_000, 100)
    replica.run(0.5)
    for _ in range(10):
        replica.send("many", 50, 4000, ends=3000)
    replica.run(2.0)
    assert len(replica.scheduler.running) == 11
    while early not in replica.ended_s:
        replica.step()
    replica.run(3.0)
    assert large in replica.first_s and replica.scheduler.load().preemptions > 0


# ---------------------------------------------------------------- names and credit


def test_fresh_names_of_users_are_worth_nothing() -> None:
    """Beside a client that names a new user with each request, another one gets half."""
    replica = VirtualReplica(100_000, max_running=4)
    number = 0
    for _ in range(600):
        while replica.num_live("attacker") < 24:
            number += 1
            replica.send("attacker", 150, 24, user=f"user {number}")
        if not replica.num_live("victim"):
            replica.send("victim", 150, 24)
        replica.step()
    waits = replica.waits_s("victim")
    assert max(waits) < 40 * STEP_S and len(waits) > 600 / (24 + 40)


def test_waiting_without_room_saves_up_no_more_than_the_credit() -> None:
    """While the second large sequence of a tenant waits for the first one, others are served. The tenant may not take
    all that it missed afterwards, for short requests of another user."""
    replica = VirtualReplica(20_000, max_running=8)
    for _ in range(2):
        replica.send("attacker", 20, 12_000, user="large")

    def step(**users: str) -> None:
        for client, user in users.items():
            while replica.num_live(client) < 20:
                replica.send(client, 200, 20, user=user)
        replica.step()

    for _ in range(800):
        step(victim="")
    before = replica.served["victim"]
    for _ in range(400):
        step(victim="", attacker="small")
    assert replica.served["victim"] - before > 400 * 2


def fresh_names(replica: VirtualReplica, rng: random.Random, step: int) -> None:
    while replica.num_live("attacker") < 40:
        replica.send("attacker", rng.randint(10, 300), rng.randint(1, 60), user=str(rng.random()))


def sleeps(replica: VirtualReplica, rng: random.Random, step: int) -> None:
    """It asks for nothing, and then for much at once, again and again."""
    if step % 400 < 40:
        while replica.num_live("attacker") < 60:
            replica.send("attacker", 400, 100)


def long_outputs(replica: VirtualReplica, rng: random.Random, step: int) -> None:
    while replica.num_live("attacker") < 40:
        replica.send("attacker", 20, rng.choice([500, 3000]))


def too_large(replica: VirtualReplica, rng: random.Random, step: int) -> None:
    while replica.num_live("attacker") < 6:
        replica.send("attacker", rng.choice([20, 4000]), 5000, user=rng.choice("abc"))


def looks_short(replica: VirtualReplica, rng: random.Random, step: int) -> None:
    """Outputs are short, so that those to come are expected to be, and then they are long."""
    while replica.num_live("attacker") < 30:
        replica.send("attacker", 50, 4000, ends=10 if step % 500 < 300 else 1000)


def many_choices(replica: VirtualReplica, rng: random.Random, step: int) -> None:
    if replica.num_live("attacker") < 64:
        prompt = [rng.randrange(3, 49_000) for _ in range(200)]
        for _ in range(32):
            replica.send("attacker", prompt, 200)


ATTACKS = fresh_names, sleeps, long_outputs, too_large, looks_short, many_choices


@pytest.mark.parametrize(("attack", "weight"), [*((attack, 1.0) for attack in ATTACKS), (many_choices, 3.0)])
def test_over_any_time_a_client_gets_its_part(attack: Attack, weight: float) -> None:
    """However another one behaves: what it is served since any moment lags behind its part of all service by no more
    than the credit and what slots hold."""
    replica, rng = VirtualReplica(12_000, max_running=16), random.Random(5)
    part, lags = weight / (1 + weight), [0.0]
    for step in range(600):
        attack(replica, rng, step)
        while replica.num_live("victim") < 24:
            replica.send("victim", rng.randint(20, 200), rng.randint(4, 40), weight=weight)
        replica.step()
        lags.append(part * sum(replica.work.values()) - replica.work["victim"])
    lag = np.array(lags)
    worst = float((lag - np.minimum.accumulate(lag)).max())
    assert worst < CREDIT_TOKENS, f"{worst:.0f} tokens behind"
    assert replica.work["victim"] > 0.7 * part * sum(replica.work.values())


@pytest.mark.parametrize("pp", [1, 2])
def test_who_gives_way_says_the_same(drive, pp: int) -> None:
    """And no page is lost, whoever overtakes whom."""
    d, rng, asked = drive(num_pages=40, max_running=4, pp=pp), random.Random(7), dict[str, tuple[list[int], int]]()

    def ask(client: str, length: int, tokens: int, user: str = "") -> None:
        name = f"{client} {len(asked)}"
        asked[name] = prompt(length, seed=len(asked)), tokens
        d.add(name, *asked[name], client=client, user=user)

    for number in range(8):
        ask("long", 5, 40, user=str(number % 2))
    for step in range(80):
        if step % 10 == 0:
            ask("short", rng.randint(1, 30), rng.randint(1, 6))
        if step % 40 == 0:
            ask("large", rng.randint(60, 100), 12)
        d.now_s += 0.2
        d.step()
        d.scheduler.check_integrity()
    assert d.scheduler.load().preemptions > 0
    while d.scheduler.has_work or d.flight:
        d.step()
    assert all(d.tokens(name) == d.executor.generate(*request) for name, request in asked.items())


def test_who_gives_way_does_not_start_in_the_same_step(drive) -> None:
    """Its last chunk may be in flight."""
    d, rng, number = drive(num_pages=40, max_running=6, token_budget=512), random.Random(1), itertools.count()
    give_way, schedule = d.scheduler._preemption.give_way, d.scheduler.schedule
    gave, again = list[Any](), list[Any]()

    def ask(client: str, length: int, tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        d.add(f"{client} {next(number)}", prompt(length, seed=next(number)), client=client, sampling=sampling)

    def seen() -> Any:
        before = len(gave)
        made = schedule()
        again.extend(seq for seq in gave[before:] if seq.is_running)
        return made

    d.scheduler._preemption.give_way = lambda seq: (gave.append(seq), give_way(seq))
    d.scheduler.schedule = seen
    for _ in range(12):
        ask("long", rng.choice([4, 5, 40]), rng.choice([20, 60]))
    for step in range(150):
        if step % 8 == 0:
            ask("short", rng.randint(1, 30), rng.randint(1, 8))
        if step % 30 == 0:
            ask("large", rng.randint(60, 110), 12)
        if len(d.scheduler) < 10:
            ask("long", rng.choice([4, 5, 40]), rng.choice([20, 60]))
        d.now_s += 0.2
        d.step()
    assert not again
    assert gave or d.overlap
