"""A client with few short requests alongside one that attacks, in virtual time: it waits no more than twice as long as
alongside a client like itself, however fast the replica is."""

import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

from tests.worker.virtual_replica import VirtualReplica
from worker.scheduler.fair_share import CREDIT_S, CREDIT_TOKENS
from worker.scheduler.service_speed import FADE, WINDOW_S, ServiceSpeed


class Speed(NamedTuple):
    """A replica's: seconds of a step, and of each token in it. `rate_s`: requests a second of a client with few."""

    step_s: float
    token_s: float
    rate_s: float


# An 8B model on an H200, and a small model on one core of a CPU.
SPEEDS = {"fast": Speed(0.006, 25e-6, 20.0), "slow": Speed(0.03, 0.002, 1.0)}
Attack = Callable[[VirtualReplica, random.Random], None]


def long_outputs(replica: VirtualReplica, rng: random.Random) -> None:
    while replica.num_live("attacker") < 64:
        replica.send("attacker", 20, 400)


def long_prompts(replica: VirtualReplica, rng: random.Random) -> None:
    while replica.num_live("attacker") < 16:
        replica.send("attacker", 4000, 4)


def many_choices(replica: VirtualReplica, rng: random.Random) -> None:
    if replica.num_live("attacker") < 300:
        asked = [rng.randrange(3, 49_000) for _ in range(100)]
        for _ in range(100):
            replica.send("attacker", asked, 100)


def fresh_users(replica: VirtualReplica, rng: random.Random) -> None:
    while replica.num_live("attacker") < 24:
        replica.send("attacker", 150, 24, user=str(rng.random()))


ATTACKS = long_outputs, long_prompts, many_choices, fresh_users


def waits_s(replica: VirtualReplica, speed: Speed, attack: Attack | None, requests: int) -> list[float]:
    """How long a client's requests waited, from when they were due. Without an attack, a second client is like it."""
    arrivals, rng = random.Random(2), random.Random(1)
    clients = ("bystander",) if attack else ("bystander", "neighbour")
    due = sorted((replica.now_s + (n + arrivals.random()) / speed.rate_s, c) for n in range(requests) for c in clients)
    sent: list[tuple[str, float]] = []
    while due or replica.num_live("bystander"):
        while due and due[0][0] <= replica.now_s:
            due_s, client = due.pop(0)
            request = replica.send(client, 60, 6)
            if client == "bystander":
                sent.append((request, due_s))
        if attack:
            attack(replica, rng)
        if replica.scheduler.has_work:
            replica.step()
        else:
            replica.now_s = due[0][0]
    return [replica.first_s[request] - due_s for request, due_s in sent]


def warm(speed: Speed) -> tuple[VirtualReplica, list[float]]:
    """A replica that has served two clients with few requests, and how long those of one waited."""
    replica = VirtualReplica(16_384, max_running=32, cost_s=lambda tokens: speed.step_s + speed.token_s * tokens)
    return replica, waits_s(replica, speed, None, 20)


@cache
def control_s(name: str) -> float:
    return max(warm(SPEEDS[name])[1])


@pytest.mark.parametrize("name", SPEEDS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bystander_waits_no_more_than_twice_as_long(attack: Attack, name: str) -> None:
    speed = SPEEDS[name]
    replica, _ = warm(speed)
    begun_s, rng = replica.now_s, random.Random(0)
    while replica.now_s < begun_s + 2:  # what the attacker has saved up
        attack(replica, rng)
        replica.step()
    waits = sorted(waits_s(replica, speed, attack, 12))
    assert waits[-2] <= 2 * control_s(name), [round(wait, 3) for wait in waits[-4:]]
    replica.scheduler.check_integrity()


def test_what_is_saved_up_follows_the_speed() -> None:
    """And is never more than for the fastest."""
    credits = {name: warm(speed)[0].scheduler._shares.credit for name, speed in SPEEDS.items()}
    assert credits["slow"] < CREDIT_S / SPEEDS["slow"].token_s
    assert credits["slow"] < credits["fast"] <= CREDIT_TOKENS


def test_a_light_load_hides_the_speed_only_slowly() -> None:
    speed = ServiceSpeed()
    for number in range(10):
        speed.served(100 * WINDOW_S)
        speed.passes(number * WINDOW_S, is_contended=True)
    assert speed.tokens_s == pytest.approx(100)
    for number in range(10, 20):
        speed.passes(number * WINDOW_S, is_contended=True)
    assert speed.tokens_s == pytest.approx(100 * FADE**10)
    speed.served(1e9)  # while clients do not compete
    speed.passes(21 * WINDOW_S, is_contended=False)
    speed.passes(22 * WINDOW_S, is_contended=True)
    speed.served(50 * WINDOW_S)
    speed.passes(23 * WINDOW_S, is_contended=True)
    assert speed.tokens_s == pytest.approx(100 * FADE**11)
