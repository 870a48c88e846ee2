"""Fairness between clients: the counters alone, and in the scheduler."""

import numpy as np
import pytest

from tests.worker.driver import Driver, prompt
from worker.scheduler.fair_share import CREDIT, FAR_BEHIND, MOST_IDLE, OUTPUT_TOKENS, ClientShare, FairShare


def waiting(shares: FairShare, tenant: str, user: str = "", weight: float = 1.0) -> ClientShare:
    """The share of a client, one more of whose sequences waits."""
    share = shares.open(tenant, user, weight)
    shares.enqueue(share)
    return share


def in_order(shares: FairShare, *queues: tuple[ClientShare, list[int]], rank=lambda size: (0,), served=False) -> list:
    """The sizes of prompts in the order in which they are served."""
    return list(shares.order([(share, iter(sizes)) for share, sizes in queues], rank, int, lambda size: served))


# ---------------------------------------------------------------- the counters


def test_clients_take_turns_by_the_tokens_that_they_get() -> None:
    shares = FairShare()
    a, b = waiting(shares, "a"), waiting(shares, "b")
    assert in_order(shares, (a, [100, 101]), (b, [40, 41, 42, 43])) == [100, 40, 41, 42, 101, 43]
    shares.charge(a, 90)
    assert in_order(shares, (a, [100, 101]), (b, [40, 41, 42])) == [40, 41, 42, 100, 101]
    shares.charge_outputs(np.array([b.index] * 50))
    assert shares.counter(b.tenant) == 50 * OUTPUT_TOKENS
    assert in_order(shares, (a, [100, 101]), (b, [40])) == [100, 40, 101]


def test_weights_and_ranks() -> None:
    shares = FairShare()
    a, b = waiting(shares, "a", weight=3.0), waiting(shares, "b")
    assert in_order(shares, (a, [30, 31, 32, 33]), (b, [28, 29])) == [30, 28, 31, 32, 29, 33]
    assert in_order(shares, (a, [30]), (b, [28, 29]), rank=lambda size: (size == 30,)) == [28, 29, 30]


def test_users_divide_the_share_of_their_client() -> None:
    """Two users of a client get as much as another client that has none."""
    shares = FairShare()
    one, two, other = waiting(shares, "a", "one"), waiting(shares, "a", "two"), waiting(shares, "b")
    shares.charge(one, 10)
    assert shares.counter(one.tenant) == 20
    shares.charge_outputs(np.array([two.index, two.index]))
    assert shares.counter(two.tenant) == 4 * OUTPUT_TOKENS
    shares.dequeue(two)
    shares.close(two)
    shares.charge(one, 10)
    assert shares.counter(one.tenant) == 30 and shares.counter(other) == 0


def test_an_open_server_counts_nothing() -> None:
    shares = FairShare()
    anybody = waiting(shares, "")
    shares.charge(anybody, 100)
    assert shares.counter(anybody.tenant) == 0 and not shares.is_contended


def test_only_some_service_is_saved_up() -> None:
    shares = FairShare()
    a, b = waiting(shares, "a"), waiting(shares, "b")
    shares.dequeue(b)
    shares.charge(a, 100_000)
    shares.enqueue(b)
    assert shares.counter(b.tenant) == 100_000 - CREDIT
    shares.dequeue(a)
    shares.charge(a, 100_000)
    shares.dequeue(b)  # the last to leave
    c = waiting(shares, "c")
    assert shares.counter(c.tenant) == 100_000 - 2 * CREDIT
    shares.enqueue(a)
    assert shares.counter(a.tenant) == 200_000  # what was served is not forgiven


def test_a_client_far_behind_has_its_step_for_itself() -> None:
    shares = FairShare()
    flood, quiet = waiting(shares, "flood"), waiting(shares, "quiet")
    shares.charge(flood, int(FAR_BEHIND) + 1000)
    queues = (flood, [10, 11]), (quiet, [900, 99])
    assert in_order(shares, *queues, served=True) == [900, 99]
    assert in_order(shares, *queues, served=False) == [900, 99, 10, 11]  # it had no room: the step is for others
    shares.charge(quiet, 2)
    assert in_order(shares, *queues, served=True) == [900, 99, 10, 11]


def test_clients_that_are_gone_are_forgotten() -> None:
    shares = FairShare()
    stays = waiting(shares, "stays")
    for number in range(MOST_IDLE + 100):
        share = waiting(shares, f"c{number}")
        shares.charge(share, 5)
        shares.dequeue(share)
        shares.close(share)
    assert len(shares._shares) == MOST_IDLE + 1 == len(shares._tenant_index)
    assert waiting(shares, "stays") is stays and shares.counter(waiting(shares, f"c{number}")) == 5
    assert len(shares._free) + len(shares._shares) == len(shares._counters)


# ---------------------------------------------------------------- in the scheduler


def first_tokens(d: Driver) -> list[str]:
    """Request ids in the order of their first tokens."""
    d.run()
    return [name for name, outputs in d.outputs.items() if outputs[0].token_ids]


def flood(d: Driver, count: int = 6) -> None:
    for number in range(count):
        d.add(f"flood {number}", prompt(8, seed=number), client="flood", max_tokens=2)


def test_a_quiet_client_does_not_wait_behind_one_that_floods(drive):
    d = drive(max_running=1)
    flood(d)
    d.add("quiet", prompt(30, seed=50), client="quiet", max_tokens=2)  # longer, and later
    assert first_tokens(d).index("quiet") <= 1


@pytest.mark.parametrize("starved_s", [0.0, 100.0])
def test_waiting_for_long_does_not_help_the_one_that_floods(drive, starved_s):
    d = drive(max_running=1)
    flood(d)
    d.now_s += starved_s
    d.add("quiet", prompt(8, seed=50), client="quiet", max_tokens=2)
    assert first_tokens(d).index("quiet") <= 1


def test_priority_is_above_fairness(drive):
    d = drive(max_running=1)
    for number in range(3):
        d.add(f"urgent {number}", prompt(8, seed=number), client="flood", priority=1, max_tokens=2)
    d.add("quiet", prompt(8, seed=50), client="quiet", max_tokens=2)
    assert first_tokens(d)[-1] == "quiet"


def test_long_prompts_of_one_client_give_way_to_another(drive):
    """While they are computed, chunk by chunk."""
    d = drive(num_pages=256, token_budget=8)
    d.add("flood", prompt(200, seed=1), client="flood", max_tokens=1)
    d.step()
    d.now_s += 30.0
    d.add("quiet", prompt(40, seed=2), client="quiet", max_tokens=1)
    assert first_tokens(d) == ["quiet", "flood"]


def test_everybody_gets_an_equal_part(drive):
    """Of the sequences that have begun when half of the work is done."""
    d = drive(max_running=2, num_pages=256)
    for number in range(24):
        d.add(f"many {number}", prompt(8, seed=number), client="many", max_tokens=3)
    for number in range(8):
        d.add(f"few {number}", prompt(8, seed=100 + number), client="few", max_tokens=3)
    begun = first_tokens(d)
    assert 7 <= sum(name.startswith("few") for name in begun[:16]) <= 9
    assert len(begun) == 32  # and nothing is held back


def test_one_client_alone_is_served_as_if_there_were_no_clients(drive):
    orders = []
    for client in ("", "some"):
        d = drive(max_running=2, num_pages=256)
        for number in range(12):
            d.add(str(number), prompt(4 + 7 * (number % 5), seed=number), client=client, max_tokens=1 + number % 4)
        orders.append(first_tokens(d))
    assert orders[0] == orders[1]


def test_first_come_first_served_stays_so(drive):
    d = drive(max_running=1, scheduling_policy="fcfs")
    flood(d, 3)
    d.add("quiet", prompt(8, seed=50), client="quiet", max_tokens=2)
    assert first_tokens(d)[-1] == "quiet"
