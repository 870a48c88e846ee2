"""A step is planned while the one before it runs."""

import pytest

from tests.worker.driver import Driver, prompt
from worker.step import PENDING


@pytest.fixture
def overlapped(fake_executor):
    def make(**config) -> Driver:
        return Driver(fake_executor(num_pages=64, page_size=4), overlap=True, **config)

    return make


def test_a_decode_is_planned_before_its_token_is_known(overlapped):
    d = overlapped()
    d.add("a", prompt(6), max_tokens=4)
    plans = d.run()
    assert [chunk.token_ids for plan in plans for chunk in plan.chunks] == [prompt(6), [PENDING], [PENDING], [PENDING]]
    assert d.tokens("a") == d.executor.generate(prompt(6), 4)


def test_nothing_is_planned_beyond_the_limit_and_one_step_beyond_a_stop(overlapped):
    whole = overlapped().executor.generate(prompt(8), 30)
    end = whole.index(whole[6]) + 1
    d = overlapped(eos=(whole[6],))
    d.add("a", prompt(8), max_tokens=30)
    assert len(d.run()) == end + 1
    assert d.tokens("a") == whole[:end]
    d.scheduler.check_integrity()
    assert d.tree.num_cached == (8 + end - 1) // 4, "what was computed too much is not in the tree"


def test_a_slot_that_has_a_new_owner_does_not_get_the_old_ones_token(overlapped):
    d = overlapped(max_running=1)
    d.add("old", prompt(8, seed=1), max_tokens=30)
    d.step()
    d.add("new", prompt(8, seed=2), max_tokens=3)
    d.step()
    assert d.flight is not None
    d.scheduler.abort(["old"])
    d.run()
    assert d.tokens("new") == d.executor.generate(prompt(8, seed=2), 3)
    assert len(d.tokens("old")) == 1


def test_only_decodes_tell_how_long_a_token_took(drive, monkeypatch):
    d = drive(num_pages=8, page_size=4, token_budget=16)
    gaps: list[float] = []
    monkeypatch.setattr(d.scheduler.policy, "finished", gaps.append)
    d.add("a", prompt(8), max_tokens=6)
    for _ in range(4):
        d.now_s += 1.0
        d.step()
    d.land()
    assert gaps and max(gaps) <= 1.0
    d.scheduler._preemption.preempt(next(iter(d.scheduler.running)))
    d.now_s += 100.0  # what it computes again, of its outputs too, is no decode
    d.run()
    assert d.tokens("a") == d.executor.generate(prompt(8), 6)
    assert max(gaps) <= 1.0


def preempted_in_flight(d: Driver, max_tokens: int) -> Driver:
    """With "a", which lost its pages while its second token was computed."""
    d.add("a", prompt(8), max_tokens=max_tokens)
    d.step()
    d.step()
    d.scheduler._preemption.preempt(next(iter(d.scheduler.running)))
    return d


def test_the_token_in_flight_of_one_that_is_preempted_is_kept(overlapped):
    d = preempted_in_flight(overlapped(), max_tokens=6)
    d.land()
    d.collect()
    assert d.tokens("a") == d.executor.generate(prompt(8), 2)
    d.run()
    assert d.tokens("a") == d.executor.generate(prompt(8), 6)


def test_one_that_is_preempted_before_its_last_token_comes_ends_where_it_waits(overlapped):
    d = preempted_in_flight(overlapped(), max_tokens=2)
    d.run()
    assert (d.tokens("a"), d.reason("a")) == (d.executor.generate(prompt(8), 2), "length")
    assert len(d.scheduler) == 0
