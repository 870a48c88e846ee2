"""Which of the waiting sequences goes next."""

from tests.worker.driver import Driver, prompt
from worker.messages import SamplingParams


def order_of(d: Driver) -> list[str]:
    """Request ids in the order of their first tokens."""
    d.run()
    return [name for name, outputs in d.outputs.items() if outputs[0].token_ids]


def test_higher_priority_first_then_arrival(drive):
    d = drive(max_running=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)):
        d.add(name, prompt(6, seed=ord(name)), priority=priority, max_tokens=1)
    assert order_of(d) == ["c", "e", "a", "b", "d"]


def test_longest_cached_prefix_first_until_one_starves(drive):
    d = drive(max_running=1, starvation_s=5.0)
    d.add("warm", prompt(40), max_tokens=1)
    d.run()
    d.add("cold", prompt(8, seed=1), max_tokens=1)
    d.add("some", prompt(8) + prompt(8, seed=2), max_tokens=1)
    d.add("most", prompt(40), max_tokens=1)
    assert order_of(d) == ["warm", "most", "some", "cold"]

    d = drive(max_running=1, starvation_s=5.0)
    d.add("warm", prompt(40), max_tokens=1)
    d.run()
    d.add("cold", prompt(8, seed=1), max_tokens=1)
    d.now_s = 6.0
    d.add("most", prompt(40), max_tokens=1)
    assert order_of(d) == ["warm", "cold", "most"]


def test_one_that_waits_for_anothers_prefix_starts_when_that_is_cached(drive):
    """Though there are no pages for all of it."""
    d = drive(num_pages=16, token_budget=16)
    d.add("a", prompt(40), max_tokens=20)
    d.step()
    d.add("b", [*prompt(40), 1], max_tokens=2)
    while not d.reason("b"):
        d.step()
        assert not d.reason("a")
    assert d.outputs["b"][0].cached_tokens == 40
    d.run()
    assert d.tokens("b") == d.runner.generate([*prompt(40), 1], 2)


def test_thousands_wait_without_a_look_up_each_step(drive, monkeypatch):
    d = drive(max_running=1)
    for i in range(3000):
        d.add(str(i), prompt(6, seed=i), max_tokens=1)
    looked_up = []
    find = d.tree.match
    monkeypatch.setattr(d.tree, "match", lambda tokens: looked_up.append(0) or find(tokens))
    for _ in range(20):
        d.step()
    assert len(looked_up) < 20 * 12


def test_longest_outputs_first_for_jobs(drive):
    """Whoever waits how long; what is cached goes before."""
    d = drive(max_running=1, schedule="offline", starvation_s=0.0)
    d.add("warm", prompt(8), max_tokens=1)
    d.run()
    d.now_s = 100.0
    for name, seed, most in (("a", 1, 3), ("b", 2, 9), ("c", 3, 5), ("d", 4, 9)):
        d.add(name, prompt(6, seed=seed), max_tokens=most)
    d.add("cached", prompt(8) + prompt(3, seed=5), max_tokens=2)
    d.add("first", prompt(6, seed=6), priority=1, max_tokens=1)
    assert order_of(d) == ["warm", "first", "cached", "b", "d", "c", "a"]


def test_no_request_is_overtaken_by_later_jobs(drive):
    """What comes within a time is one job."""
    d = drive(max_running=1, schedule="offline", starvation_s=5.0)
    for now_s, name, most in ((0.0, "a", 2), (4.0, "b", 9), (6.0, "c", 30), (11.0, "d", 40), (12.0, "e", 20)):
        d.now_s = now_s
        d.add(name, prompt(6, seed=most), max_tokens=most)
    assert order_of(d) == ["b", "a", "d", "c", "e"]


def test_outputs_are_as_long_as_others_were(drive):
    """Where an end token may come: the limit says little."""
    d = drive(max_running=1, schedule="offline", eos=(7,))
    d.add("known", prompt(6, seed=1), sampling=SamplingParams(max_tokens=90, temperature=0, ignore_eos=True))
    d.add("guessed", prompt(6, seed=2), max_tokens=100)  # of which 7 in 10 are expected at first
    assert order_of(d) == ["known", "guessed"]
