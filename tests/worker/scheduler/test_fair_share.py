"""Fairness between clients: the counters alone, and in the scheduler."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.driver import Driver, prompt
from worker.scheduler.fair_share import (
    CREDIT_TOKENS,
    FAR_BEHIND_TOKENS,
    MAX_IDLE_TENANTS,
    MAX_IDLE_USERS,
    OUTPUT_TOKENS,
    ClientShare,
    FairShare,
)


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
    """However many they are, they get as much as another client that has none; each of them as much as the others."""
    shares = FairShare()
    one, two, other = waiting(shares, "a", "one"), waiting(shares, "a", "two"), waiting(shares, "b")
    queues = (one, [100, 101, 102]), (two, [200]), (other, [140, 141, 142])
    assert in_order(shares, *queues) == [140, 100, 200, 141, 142, 101, 102]
    shares.charge(one, 10)
    assert [shares.counter(of) for of in (one, two, one.tenant, other.tenant)] == [10, 0, 10, 0]
    shares.charge_outputs(np.array([two.index, two.index]))
    assert [shares.counter(of) for of in (one, two, one.tenant)] == [10, 2 * OUTPUT_TOKENS, 10 + 2 * OUTPUT_TOKENS]


def test_a_new_user_begins_where_its_tenant_is() -> None:
    shares = FairShare()
    old, other = waiting(shares, "a", "old"), waiting(shares, "b")
    shares.charge(old, 50_000)
    shares.charge(other, 60_000)
    new = waiting(shares, "a", "new")
    assert shares.counter(new) == 50_000
    assert in_order(shares, (old, [9000]), (new, [9001]), (other, [8])) == [9000, 9001, 8]  # not twice 50,000 behind
    shares.dequeue(new)
    shares.close(new)
    shares.charge(old, 1000)
    assert shares.counter(waiting(shares, "a", "new")) == 51_000  # it did not ask for what it missed


def test_what_is_to_come_counts_in_the_order() -> None:
    """And not in what is saved up."""
    shares = FairShare()
    a, b = waiting(shares, "a", weight=2.0), waiting(shares, "b")
    shares.expect(np.array([a.index, a.index, b.index]), np.array([30, 10, 15]))
    assert in_order(shares, (a, [10, 11]), (b, [20, 9])) == [20, 10, 11, 9]
    assert shares.turn(a.tenant) == 40 * OUTPUT_TOKENS / 2 and shares.counter(a.tenant) == 0
    shares.expect(np.array([], dtype=np.int64), np.array([]))
    assert shares.turn(a.tenant) == 0


def test_those_that_cannot_start_do_not_save_up_what_others_get() -> None:
    shares = FairShare()
    stuck, runs = waiting(shares, "stuck"), waiting(shares, "runs")
    shares.charge(runs, 100_000)
    shares.starts(runs, 0.0)
    assert shares.counter(stuck.tenant) == 100_000 - CREDIT_TOKENS and shares.counter(runs.tenant) == 100_000


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
    assert shares.counter(b.tenant) == 100_000 - CREDIT_TOKENS
    shares.dequeue(a)
    shares.charge(a, 100_000)
    shares.dequeue(b)  # the last to leave
    c = waiting(shares, "c")
    assert shares.counter(c.tenant) == 100_000 - 2 * CREDIT_TOKENS
    shares.enqueue(a)
    assert shares.counter(a.tenant) == 200_000  # what was served is not forgiven


def test_a_client_far_behind_has_its_step_for_itself() -> None:
    shares = FairShare()
    flood, quiet = waiting(shares, "flood"), waiting(shares, "quiet")
    shares.computes(quiet, 1)  # so that it is not quiet in the strict sense
    shares.charge(flood, int(FAR_BEHIND_TOKENS) + 1000)
    queues = (flood, [10, 11]), (quiet, [900, 99])
    assert in_order(shares, *queues, served=True) == [900, 99]
    assert in_order(shares, *queues, served=False) == [900, 99, 10, 11]  # it had no room: the step is for others
    shares.charge(quiet, 2)
    assert in_order(shares, *queues, served=True) == [900, 99, 10, 11]


def visit(shares: FairShare, tenant: str, user: str, tokens: int) -> None:
    """A client that has one sequence."""
    share = waiting(shares, tenant, user)
    shares.charge(share, tokens)
    shares.dequeue(share)
    shares.close(share)


@pytest.mark.parametrize("by_user", [False, True])
def test_a_flood_of_names_is_forgotten_and_pushes_nobody_out(by_user: bool) -> None:
    shares = FairShare()
    stays = waiting(shares, "stays")
    visit(shares, "gone", "", 70_000)
    known = shares.num_known
    for number in range(3000):
        visit(shares, "flood" if by_user else f"flood {number}", str(number), 5)
    assert shares.num_known <= known + (2 * MAX_IDLE_USERS + 1 if by_user else 4 * MAX_IDLE_TENANTS)
    assert waiting(shares, "stays") is stays
    gone = waiting(shares, "gone")
    assert shares.counter(gone.tenant) == 70_000


def test_a_new_client_begins_with_nothing_of_a_forgotten_one() -> None:
    """Though it has the place of one among the counters."""
    shares = FairShare()
    for number in range(3 * MAX_IDLE_USERS):
        visit(shares, "flood", str(number), 5)
    assert shares.num_known < 3 * MAX_IDLE_USERS
    new = waiting(shares, "new")
    assert (shares.counter(new), shares.counter(new.tenant)) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 30_000)), max_size=600))
def test_no_name_comes_back_with_less_than_it_had(visits: list[tuple[int, int]]) -> None:
    """Not by being forgotten, nor is a new one worth more than a known one."""
    shares, had = FairShare(), dict[str, float]()
    waiting(shares, "a", "stays")
    for user, tokens in visits:
        share = waiting(shares, "a", str(user))
        assert shares.counter(share) >= had.get(str(user), 0.0)
        shares.charge(share, tokens)
        had[str(user)] = shares.counter(share)
        shares.dequeue(share)
        shares.close(share)


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
