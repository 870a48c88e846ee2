"""Sequences of models with windows: which pages they give back, and what goes on from their prefixes. The fake executor
refuses a window of other tokens than those before a chunk."""

import random

import pytest

from tests.worker.driver import Driver, prompt
from tests.worker.fakes import Window
from worker.messages import SamplingParams

WINDOW = 10  # tokens; pages have 4


def driven(drive, window_pages: int = 40, **config) -> Driver:
    settings = {"token_budget": 64, "num_pages": 100, "window": Window(window_pages, WINDOW)}
    return drive(**settings | config)


def cached(d: Driver, request_id: str) -> int | None:
    return d.outputs[request_id][0].cached_tokens


def check(d: Driver, request_id: str, tokens: list[int], max_tokens: int = 5) -> None:
    assert d.tokens(request_id) == d.executor.generate(tokens, max_tokens)


def test_a_sequence_holds_its_window_alone(drive):
    """Its prompt is longer than all window pages, its output too."""
    d = driven(drive, window_pages=14, token_budget=16)
    d.add("a", prompt(150), max_tokens=150)
    most = 0
    while d.scheduler.has_work or d.flight:
        d.step()
        d.scheduler.check_integrity()
        load = d.scheduler.load()
        most = max(most, load.window_tokens_used)
        assert load.window_tokens_total == 56
    check(d, "a", prompt(150), 150)
    assert most <= 2 * 16 + 2 * WINDOW + 8, "two chunks in flight, the window that is read, and that which grows"
    assert d.scheduler.load().preemptions == 0


@pytest.mark.parametrize("budget", [7, 64])
def test_prompts_and_conversations_go_on_where_they_end(drive, budget):
    d = driven(drive, token_budget=budget)
    turn = prompt(24)
    for name, tokens in (("a", turn), ("again", turn), ("longer", [*turn, 1, 2, 3])):
        d.add(name, tokens, max_tokens=30)
        d.run()
        check(d, name, tokens, 30)
    assert [cached(d, name) for name in ("a", "again", "longer")] == [0, 20, 24]
    reply = [*turn, *d.tokens("a")]
    d.add("reply", [*reply, 5, 6, 7])
    d.run()
    assert cached(d, "reply") == (len(reply) - 1) // 4 * 4
    check(d, "reply", [*reply, 5, 6, 7])


def test_where_prompts_part_a_third_goes_on(drive):
    d = driven(drive)
    for i in range(3):
        d.add(str(i), [*prompt(41), i, i, i, i])
        d.run()
        check(d, str(i), [*prompt(41), i, i, i, i])
    assert [cached(d, str(i)) for i in range(3)] == [0, 0, 40]


def test_prompts_that_come_at_once_go_on_where_they_part(drive):
    d = driven(drive, token_budget=32)
    prompts = [[*prompt(34), *prompt(10, seed=1 + i)] for i in range(3)]
    for i, tokens in enumerate(prompts):
        d.add(str(i), tokens)
    d.add("apart", prompts[0], cache_salt="other")
    d.run()
    assert [cached(d, str(i)) for i in range(3)] == [0, 32, 32] and cached(d, "apart") == 0
    for i, tokens in enumerate(prompts):
        check(d, str(i), tokens)


def test_a_long_prompt_can_be_continued_at_intervals(drive):
    d = driven(drive, token_budget=200, checkpoint_interval=30)
    d.add("a", prompt(150))
    d.run()
    for end, goes_on in ((110, 96), (45, 32), (30, 0)):
        d.add(str(end), [*prompt(150)[:end], *prompt(9, seed=end)])
        d.run()
        assert cached(d, str(end)) == goes_on
        check(d, str(end), [*prompt(150)[:end], *prompt(9, seed=end)])


def test_a_preempted_sequence_goes_on_from_its_window(drive, crowded):
    d = driven(drive, num_pages=24, window_pages=40)
    for i in range(4):
        d.add(str(i), prompt(8, seed=i), max_tokens=60)
    plans = d.run()
    assert d.scheduler.load().preemptions > 0
    for i in range(4):
        check(d, str(i), prompt(8, seed=i), 60)
    assert max(chunk.start for plan in plans for chunk in plan.chunks if len(chunk.token_ids) > 1) > 16


def test_sequences_are_preempted_when_windows_run_out(drive, monkeypatch):
    monkeypatch.setattr("worker.scheduler.window_pages.WindowPages.has_room_for", lambda group, seq, running: True)
    d = driven(drive, window_pages=12)
    for i in range(6):
        d.add(str(i), prompt(8, seed=i), max_tokens=30)
    d.run()
    assert d.scheduler.load().preemptions > 0
    for i in range(6):
        check(d, str(i), prompt(8, seed=i), 30)


def test_no_more_sequences_start_than_have_windows(drive):
    d = driven(drive, window_pages=12)
    for i in range(6):
        d.add(str(i), prompt(8, seed=i), sampling=SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    d.run()
    assert d.scheduler.load().preemptions == 0
    for i in range(6):
        check(d, str(i), prompt(8, seed=i), 30)


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_window_pages_of_a_sequence_that_ends_early_come_back(drive, end):
    d = driven(drive, token_budget=8)
    for steps in (1, 3, 12):
        name = str(steps)
        d.add(name, prompt(30), max_tokens=40)
        for _ in range(steps):
            d.step()
        d.scheduler.abort([name]) if end == "abort" else d.scheduler.fail(name, None)
        d.land()
        d.scheduler.check_integrity()
        d.run()
    (windows,) = d.tree.components
    assert windows.pool.num_free + windows.num_cached == 40


def test_nothing_is_held_of_a_chunk_that_has_ended(drive):
    d = driven(drive, token_budget=16, window=Window(40, 16, in_chunks=True))
    for name, tokens in (("a", prompt(33)), ("again", prompt(33)), ("later", [*prompt(33), *prompt(9, seed=1)])):
        d.add(name, tokens, max_tokens=20)
        d.run()
        check(d, name, tokens, 20)
    assert [cached(d, name) for name in ("a", "again", "later")] == [0, 32, 32]
    assert d.scheduler.load().window_tokens_used == 0


@pytest.mark.parametrize(("pp", "in_chunks"), [(1, False), (3, False), (1, True), (3, True)])
def test_a_random_crowd(fake_executor, pp, in_chunks, crowded):
    """Shared prefixes, salts, priorities, aborts, few pages of both kinds."""
    rng = random.Random(pp)
    window = Window(18, 12 if in_chunks else WINDOW, in_chunks)
    fake = fake_executor(num_pages=40, page_size=4, window=window)
    d = Driver(fake, token_budget=24, pp=pp, checkpoint_interval=16)
    wanted = {}
    for i in range(60):
        tokens = [*prompt(rng.choice([0, 9, 30, 50]), seed=rng.randrange(2)), *prompt(rng.randint(1, 12), seed=i)]
        wanted[str(i)] = tokens, rng.randint(1, 40)
        d.add(str(i), *wanted[str(i)], priority=rng.randrange(2), cache_salt=rng.choice(["", "", "a"]))
        for _ in range(rng.randrange(8)):
            d.step()
            d.scheduler.check_integrity()
        if rng.random() < 0.1:
            ended = str(rng.randrange(i + 1))
            d.scheduler.abort([ended])
            if not d.reason(ended):
                del wanted[ended]
                d.outputs.pop(ended, None)
    d.run()
    for name, (tokens, max_tokens) in wanted.items():
        check(d, name, tokens, max_tokens)
    load = d.scheduler.load()
    assert load.preemptions > 0 and load.cached_tokens > 0
