"""Leases on what requests have computed: kept longest, bounded, ended by time, release or the request itself."""

import pytest

from tests.worker.driver import prompt
from worker.messages import Lease, ReplicaLoad

PAGE = 4


def cached(d, tokens: list[int]) -> int:
    return d.tree.match(tokens).num_tokens


def crowd(d, pages: int) -> None:
    """Other requests, one after another, that need so many pages."""
    for number in range(pages // 4):
        d.add(f"other {number}", prompt(12, seed=100 + number), max_tokens=4)
        d.run()


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_lease_outlives_what_came_later(drive, seconds):
    d = drive(num_pages=20)
    d.add("a", prompt(15), max_tokens=6, lease=Lease("program", "branch", seconds))
    d.run()
    said = prompt(15) + d.tokens("a")
    assert cached(d, said) == 20
    crowd(d, 40)
    assert cached(d, said) == (20 if seconds else 0)
    d.scheduler.check_integrity()
    load: ReplicaLoad = d.scheduler.load()
    assert load.kv_tokens_leased == (20 if seconds else 0)


def test_a_lease_ends_by_the_clock(drive):
    d = drive(num_pages=20)
    d.add("a", prompt(15), lease=Lease("program", "branch", 60))
    d.run()
    d.now_s += 59
    d.add(
        "b", prompt(9, seed=1), lease=Lease("program", "another branch")
    )  # renews both when it comes and when it ends
    d.run()
    d.now_s += 59
    assert d.scheduler.load().kv_tokens_leased == 16
    d.now_s += 2
    assert d.scheduler.load().kv_tokens_leased == 0
    crowd(d, 40)
    assert cached(d, prompt(15)) == 0


def test_a_released_owner_has_no_lease(drive):
    d = drive(num_pages=20)
    d.add("a", prompt(15), lease=Lease("program", "branch", 60))
    d.add("b", prompt(15, seed=1), lease=Lease("program", "other", 60))
    d.run()
    assert d.scheduler.load().kv_tokens_leased == 32
    d.scheduler.leases.release(["program", "nobody"])
    assert d.scheduler.load().kv_tokens_leased == 0


def test_a_branch_that_goes_on_keeps_one_lease(drive):
    d = drive(num_pages=20)
    said = prompt(9)
    for number in range(4):
        d.add(str(number), said, max_tokens=2, lease=Lease("program", "branch", 60))
        d.run()
        said = said + d.tokens(str(number)) + prompt(3, seed=number)
    assert len(d.scheduler.leases) == 1
    d.add("last", said, max_tokens=2, lease=Lease("program", "branch"))
    d.run()
    assert len(d.scheduler.leases) == 0


def test_leases_hold_half_of_the_pages_at_most_and_nothing_back(drive):
    d = drive(num_pages=20)
    for number in range(5):
        d.add(str(number), prompt(14, seed=number), max_tokens=3, lease=Lease(str(number), "branch", 60 + number))
        d.run()
        assert d.tree.num_leased <= 10
    kept = [number for number in range(5) if cached(d, prompt(14, seed=number)) == 12 and str(number) in leased(d)]
    assert kept == [0, 1]  # the others came when half of the pages were leased
    d.add("large", prompt(70), max_tokens=5)
    d.run()
    assert d.tokens("large") == d.executor.generate(prompt(70), 5)


def test_what_starts_beside_others_leaves_leased_pages_alone(drive):
    """A running sequence may take them; one that waits starts when there is room without them, or when it is alone."""
    d = drive(num_pages=20)
    d.add("program", prompt(38), max_tokens=2, lease=Lease("program", "branch", 60))
    d.run()
    assert d.tree.num_leased == 9
    d.add("long", prompt(14, seed=1), max_tokens=20)
    d.step()
    d.add("wide", prompt(30, seed=2), max_tokens=2)
    while "long" in d.scheduler:
        d.step()
        assert cached(d, prompt(38)) == 36
    d.run()
    assert d.tokens("wide") == d.executor.generate(prompt(30, seed=2), 2)


def test_no_client_loses_leases_to_one_that_has_more(drive):
    """The first one may have all of them, until others ask for theirs."""
    d = drive(num_pages=40)

    def lease(client: str, count: int) -> None:
        for number in range(count):
            seed, owner = sum(map(ord, client)) + number, f"{client} {number}"
            request, wish = f"{owner} {len(d.outputs)}", Lease(owner, "branch", 3600)
            d.add(request, prompt(14, seed=seed), max_tokens=3, client=client, lease=wish)
            d.run()

    lease("greedy", 8)
    assert d.tree.leased_by == {"greedy": 20}
    lease("modest", 1)
    assert d.tree.leased_by == {"greedy": 16, "modest": 4}
    lease("greedy", 8)  # again, and renews
    assert d.tree.leased_by["modest"] == 4
    lease("third", 8)
    by_client = d.tree.leased_by
    assert by_client["modest"] == 4 and by_client["greedy"] == by_client["third"] == 8
    d.scheduler.check_integrity()


def leased(d) -> set[str]:
    return set(d.scheduler.leases._owners)


def test_an_aborted_request_is_leased_as_far_as_it_came(drive):
    d = drive(num_pages=20, token_budget=8)
    d.add("a", prompt(30), lease=Lease("program", "branch", 60))
    d.step()
    d.step()
    d.land()
    d.scheduler.abort(["a"])
    assert d.scheduler.load().kv_tokens_leased == 16
    d.add("b", prompt(30), lease=Lease("program", "branch", 60))
    d.scheduler.abort(["b"])  # it waited
    assert d.scheduler.load().kv_tokens_leased == 16


def test_a_preempted_request_is_leased_when_it_ends(drive, crowded):
    d = drive(num_pages=12, token_budget=64)
    for i in range(4):
        d.add(str(i), prompt(8, seed=i), max_tokens=24, lease=Lease("program", str(i), 60))
    while d.scheduler.load().preemptions == 0 and d.scheduler.has_work:
        assert len(d.scheduler.leases) == 0
        d.step()
    d.run()
    assert d.scheduler.load().preemptions > 0
    assert all(d.tokens(str(i)) == d.executor.generate(prompt(8, seed=i), 24) for i in range(4))


def test_programs_that_think_between_calls_compute_little_twice(drive):
    """Three programs whose calls are far apart, in a cache that others fill meanwhile: with leases, only new text is
    computed."""

    def computed(seconds: float) -> int:
        """Prompt tokens of the programs that were not cached."""
        d = drive(num_pages=80, max_running=4)
        texts = {name: prompt(28, seed=number) for number, name in enumerate("abc")}
        total = 0
        for turn in range(5):
            for name, text in texts.items():
                d.add(f"{name}{turn}", text, max_tokens=4, lease=Lease(name, "branch", seconds))
                d.run()
                total += len(text) - d.outputs[f"{name}{turn}"][0].cached_tokens
                texts[name] = text + d.tokens(f"{name}{turn}") + prompt(4, seed=turn)
            for number in range(8):
                d.add(f"{turn} other {number}", prompt(40, seed=1000 + 10 * turn + number), max_tokens=2)
            d.run()
        return total

    new_text = 3 * (28 + 4 * 8)
    assert computed(60) <= new_text + 3 * 4 * PAGE  # and the page that was not full
    assert computed(0) > 3 * new_text
