"""The scheduler against a model that answers wrongly if a page, a position or a token is wrong."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schedule import POLICIES
from tests.worker.driver import Driver, prompt
from worker.messages import Generate, SamplingParams
from worker.scheduler.sequence import Sequence

# ---------------------------------------------------------------- one request


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 40])
@pytest.mark.parametrize("budget", [1, 3, 7, 512])
def test_one_request(drive, length, budget):
    d = drive(token_budget=budget)
    d.add("a", prompt(length), max_tokens=6)
    plans = d.run()
    assert d.tokens("a") == d.executor.generate(prompt(length), 6)
    assert d.reason("a") == "length"
    assert max(plan.num_tokens for plan in plans) <= budget
    assert len(plans) == -(-length // budget) + 5


def test_logits_only_where_a_token_is_sampled(drive):
    d = drive(token_budget=8)
    d.add("a", prompt(20), max_tokens=2)
    assert [[c.num_logits for c in plan.chunks] for plan in d.run()] == [[0], [0], [1], [1]]


def test_first_output_says_what_was_cached_and_how_long_it_waited(drive):
    d = drive()
    d.add("a", prompt(21))
    d.now_s = 3.0
    d.run()
    first, *rest = d.outputs["a"]
    assert (first.cached_tokens, first.queue_s) == (0, 3.0)
    assert all(o.cached_tokens is None and o.queue_s is None for o in rest)
    d.add("b", prompt(21))
    d.run()
    assert d.outputs["b"][0].cached_tokens == 20
    assert d.tokens("b") == d.tokens("a")


def test_whole_prompt_in_the_cache_computes_its_last_token_again(drive):
    d = drive()
    for name in "ab":
        d.add(name, prompt(20))
        d.run()
    assert d.outputs["b"][0].cached_tokens == 16
    assert d.tokens("a") == d.tokens("b") == d.executor.generate(prompt(20), 5)


def test_generated_tokens_are_cached_too(drive):
    d = drive()
    d.add("a", prompt(8), max_tokens=9)
    d.run()
    turn = prompt(8) + d.tokens("a") + [1, 2, 3]
    d.add("b", turn)
    d.run()
    assert d.outputs["b"][0].cached_tokens == 16
    assert d.tokens("b") == d.executor.generate(turn, 5)


# ---------------------------------------------------------------- how a request ends


def test_stops_at_eos(drive):
    outputs = drive().executor.generate(prompt(8), 30)
    eos = outputs[6]
    end = outputs.index(eos) + 1
    d = drive(eos=(eos,))
    d.add("a", prompt(8), max_tokens=30)
    d.add("b", prompt(8), sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    d.add("c", prompt(8), sampling=SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(eos,)))
    d.run()
    for name in "ac":
        assert d.tokens(name) == outputs[:end]
        last = d.outputs[name][-1]
        assert (last.finish_reason, last.stop_token_id) == ("stop", eos)
    assert d.tokens("b") == outputs
    assert (d.reason("b"), d.outputs["b"][-1].stop_token_id) == ("length", None)


@pytest.mark.parametrize(("context_length", "num_pages"), [(20, 64), (10_000, 5)])
def test_ends_where_the_context_or_the_cache_ends(drive, context_length, num_pages):
    d = drive(num_pages=num_pages, context_length=context_length)
    d.add("a", prompt(13), max_tokens=1000)
    d.add("b", prompt(19, seed=1), max_tokens=1000)
    d.run()
    assert d.tokens("a") == d.executor.generate(prompt(13), 1000) and len(d.tokens("a")) == 7
    assert d.tokens("b") == d.executor.generate(prompt(19, seed=1), 1000) and len(d.tokens("b")) == 1
    assert d.reason("a") == d.reason("b") == "length"


def test_grammar_that_is_complete_ends_it(drive):
    d = drive()
    d.add("a", prompt(8))
    d.step()
    d.land()
    d.complete = [0]
    d.run()
    assert d.reason("a") == "stop" and len(d.tokens("a")) == 2
    assert d.outputs["a"][-1].stop_token_id == d.tokens("a")[-1]


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("done", range(1, 8))
def test_resumes_after_tokens_of_another_replica(drive, done):
    d = drive()
    outputs = d.executor.generate(prompt(10), 8)
    d.add("a", prompt(10), max_tokens=8, output_ids=outputs[:done])
    d.run()
    assert d.tokens("a") == outputs[done:]
    assert d.scheduler.load().prompt_tokens == 10


def test_resumed_that_was_complete_ends_at_once(drive):
    d = drive(eos=(7,))
    assert not d.add("a", prompt(10), max_tokens=3, output_ids=[1, 2, 3])
    assert not d.add("b", prompt(10), max_tokens=9, output_ids=[1, 2, 7])
    d.run()
    assert (d.reason("a"), d.tokens("a")) == ("length", [])
    assert (d.reason("b"), d.outputs["b"][0].stop_token_id) == ("stop", 7)
    assert d.executor.plans == []


# ---------------------------------------------------------------- batches


def test_decodes_go_first_and_a_long_prompt_fills_the_rest(drive):
    d = drive(num_pages=200, token_budget=16)
    for i in range(4):
        d.add(f"short{i}", prompt(3, seed=i), max_tokens=40)
    d.step()
    d.add("long", prompt(200, seed=9), max_tokens=2)
    for _ in range(16):
        plan = d.step()
        assert [len(c.token_ids) for c in plan.chunks] == [1, 1, 1, 1, 12]
    d.run()
    for i in range(4):
        assert d.tokens(f"short{i}") == d.executor.generate(prompt(3, seed=i), 40)
    assert d.tokens("long") == d.executor.generate(prompt(200, seed=9), 2)


def test_no_more_run_than_max_running(drive):
    d = drive(max_running=3)
    for i in range(8):
        d.add(str(i), prompt(5, seed=i))
    assert max(len(plan.chunks) for plan in d.run()) == 3
    assert all(d.tokens(str(i)) == d.executor.generate(prompt(5, seed=i), 5) for i in range(8))


@pytest.mark.parametrize("starvation_s", [5.0, 0.0])
def test_same_prompts_are_computed_once(drive, starvation_s):
    d = drive(num_pages=200, token_budget=64, starvation_s=starvation_s)
    for i in range(8):
        d.add(str(i), [*prompt(40), i])
    plans = d.run()
    assert all(d.tokens(str(i)) == d.executor.generate([*prompt(40), i], 5) for i in range(8))
    computed = sum(plan.num_tokens for plan in plans)
    assert computed == 41 + 7 * 1 + 8 * 4
    assert d.scheduler.load().cached_tokens == 7 * 40


def test_different_prompts_do_not_wait_for_each_other(drive):
    d = drive(num_pages=200, token_budget=64)
    d.add("a", prompt(20, seed=1))
    d.add("b", prompt(20, seed=2))
    assert len(d.step().chunks) == 2
    d.run()


def test_same_prompts_start_at_once_where_no_prefix_is_reused(drive):
    """As those of a model with recurrent states: nobody waits for pages that the tree will not have."""
    d = drive(num_checkpoints=0, token_budget=64)
    for i in range(3):
        d.add(str(i), [*prompt(12), i], max_tokens=2)
    assert len(d.step()) == 3
    d.run()
    for i in range(3):
        assert d.tokens(str(i)) == d.executor.generate([*prompt(12), i], 2)
        assert d.outputs[str(i)][0].cached_tokens == 0


def test_prompts_that_start_at_once_are_not_all_compared_with_each_other(drive, monkeypatch):
    d = drive(num_pages=400, token_budget=1000)
    compared, shares_prefix = [], Sequence.shares_prefix
    monkeypatch.setattr(Sequence, "shares_prefix", lambda *some: compared.append(some) or shares_prefix(*some))
    for i in range(64):
        d.add(str(i), prompt(9, seed=i))
    d.step()
    assert len(d.scheduler.running) == 64 and len(compared) < 8
    d.run()


def test_pages_of_the_faster_of_two_equal_prompts_are_used_by_both(drive):
    d = drive(num_pages=12, token_budget=64)
    logprobs = SamplingParams(max_tokens=5, prompt_logprobs=0)  # such a one does not wait for another's prefix
    d.add("a", prompt(40))
    d.step()
    d.add("b", prompt(40), sampling=logprobs)
    d.step()
    d.scheduler.check_integrity()
    d.run()
    assert d.tokens("a") == d.executor.generate(prompt(40), 5)


# ---------------------------------------------------------------- aborts and failures


@pytest.mark.parametrize("steps", range(8))
def test_abort_frees_pages_wherever_it_is(drive, steps):
    d = drive(token_budget=8)
    d.add("a", prompt(30), max_tokens=10)
    d.add("b", prompt(30, seed=1), max_tokens=10)
    for _ in range(steps):
        d.step()
    d.scheduler.abort(["a", "nobody"])
    d.scheduler.check_integrity()
    before = len(d.outputs["a"])
    d.run()
    assert len(d.outputs["a"]) == before
    assert d.tokens("b") == d.executor.generate(prompt(30, seed=1), 10)
    assert d.scheduler.load().aborts == 1


def test_abort_of_one_that_is_not_ready(drive):
    d = drive()
    request = Generate(request_id="a", prompt_ids=[1], sampling=SamplingParams(max_tokens=1))
    d.scheduler.add(request, ready=False)
    assert not d.scheduler.has_work and d.scheduler.num_waiting == 1
    d.scheduler.abort(["a"])
    assert d.scheduler.num_waiting == 0 and "a" not in d.scheduler


def test_abort_takes_back_what_was_not_told(drive):
    d = drive()
    assert not d.add("a", [])
    d.scheduler.abort(["a"])
    d.add("a", prompt(9))
    d.run()
    assert d.tokens("a") == d.executor.generate(prompt(9), 5)


def test_failure_keeps_nothing_that_it_computed(drive):
    d = drive(token_budget=16)
    d.add("a", prompt(30))
    d.step()
    d.step()
    d.land()
    step = d.scheduler.schedule().step
    d.scheduler.fail("a", "why")
    assert step is not None
    d.scheduler.check_integrity()
    assert d.tree.num_cached * 4 == 28
    d.scheduler.take_outputs()


# ---------------------------------------------------------------- what it carries


def test_load_counts_tokens(drive):
    d = drive(token_budget=16, max_running=1)
    d.add("a", prompt(40), max_tokens=3)
    d.add("b", prompt(50, seed=1), max_tokens=3)
    load = d.scheduler.load()
    assert (load.waiting, load.running, load.waiting_tokens, load.context_tokens) == (2, 0, 90, 0)
    assert load.waiting_products == 40 * 20 + 50 * 25
    d.step()
    load = d.scheduler.load()
    assert (load.waiting, load.running, load.waiting_tokens, load.context_tokens) == (1, 1, 74, 16)
    assert load.waiting_products == 24 * (16 + 12) + 50 * 25
    assert (load.kv_tokens_total, load.kv_tokens_used) == (256, 16)
    d.run()
    load = d.scheduler.load()
    assert (load.waiting, load.running, load.waiting_tokens, load.context_tokens) == (0, 0, 0, 0)
    assert (load.prompt_tokens, load.output_tokens, load.finished, load.kv_tokens_used) == (90, 6, 2, 0)
    assert load.kv_tokens_cached == 40 + 52
    assert load.steps == 3 + 2 + 4 + 2
    d.add("c", prompt(40), max_tokens=1)
    assert d.scheduler.load().waiting_tokens == 4
    d.run()


# ---------------------------------------------------------------- anything goes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(drive, seed, request):
    """Thousands of steps of arrivals, aborts, failures and priorities in pools that are always too small."""
    if seed % 2:
        request.getfixturevalue("crowded")
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    num_pages = 96 // page_size + rng.randrange(4)
    d = drive(
        num_pages=num_pages,
        page_size=page_size,
        token_budget=rng.choice([3, 5, 16, 64]),
        max_running=rng.choice([3, 5, 16]),
        max_waiting=50,
        starvation_s=rng.choice([0.0, 3.0, 100.0]),
    )
    stems = [prompt(rng.randrange(1, 60), seed=i) for i in range(5)]
    expected: dict[str, list[int]] = {}
    gone: set[str] = set()
    for step in range(1500):
        d.now_s += 0.1
        if rng.random() < 0.25:
            tokens = rng.choice(stems)[: rng.randrange(1, 60)] + prompt(rng.randrange(0, 8), seed=step)
            tokens = tokens or [1]
            max_tokens = rng.randrange(1, 40)
            whole = d.executor.generate(tokens, max_tokens)
            done = rng.randrange(len(whole)) if rng.random() < 0.1 else 0
            priority = rng.choice([0, 0, 0, 1, -1])
            if d.add(str(step), tokens, max_tokens=max_tokens, output_ids=whole[:done], priority=priority):
                expected[str(step)] = whole[done:]
        if rng.random() < 0.03 and expected:
            victim = rng.choice(list(expected))
            gone.add(victim)
            d.scheduler.abort([victim])
        d.step()
        if step % 5 == 0:
            d.scheduler.check_integrity()
    d.run()
    assert len(expected) > 100
    for name, tokens in expected.items():
        if name in gone:
            assert d.tokens(name) == tokens[: len(d.tokens(name))]
        else:
            assert d.tokens(name) == tokens, name
    assert d.scheduler.load().preemptions > 0


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    overlap=st.booleans(),
    schedule=st.sampled_from(sorted(POLICIES)),
    num_pages=st.integers(2, 12),
    page_size=st.integers(1, 5),
    budget=st.integers(1, 12),
    checkpoints=st.sampled_from([None, None, 0, 1, 3, 20]),
    interval=st.integers(1, 12),
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 12), st.integers(-1, 1)), min_size=1, max_size=8
    ),
)
def test_every_request_ends_and_is_right(
    fake_executor, overlap, schedule, num_pages, page_size, budget, checkpoints, interval, requests
):
    """Without recurrent states, and with them and rows for no, few or many checkpoints."""
    executor = fake_executor(num_pages=num_pages, page_size=page_size, num_checkpoints=checkpoints)
    settings = {"schedule": schedule, "token_budget": budget, "max_running": 4, "checkpoint_interval": interval}
    d = Driver(executor, overlap=overlap, **settings)
    for i, (stem, length, max_tokens, priority) in enumerate(requests):
        d.add(str(i), prompt(20, seed=stem)[:length], max_tokens=max_tokens, priority=priority)
    d.run(2000)
    for i, (stem, length, max_tokens, _) in enumerate(requests):
        if length + 1 > d.executor.context_length:
            assert d.failure(str(i)).param == "prompt"
        else:
            assert d.tokens(str(i)) == d.executor.generate(prompt(20, seed=stem)[:length], max_tokens)


def test_a_salt_keeps_prefixes_apart(drive):
    """Those that are cached, and those that are being computed: another salt's sequence does not wait for them."""
    d = drive(num_pages=64, token_budget=16)
    d.add("a", prompt(24), cache_salt="one")
    d.run()
    for name, salt, cached in (("same", "one", 20), ("other", "two", 0), ("none", "", 0)):
        d.add(name, prompt(24), cache_salt=salt)
        d.run()
        assert d.outputs[name][0].cached_tokens == cached
        assert d.tokens(name) == d.tokens("a")
    d.add("long", prompt(40, seed=1), cache_salt="one", max_tokens=1)
    d.step()
    d.add("apart", prompt(12, seed=1), cache_salt="two", max_tokens=1)
    d.run()
    assert list(d.outputs)[-2:] == ["apart", "long"] and d.outputs["apart"][0].cached_tokens == 0
