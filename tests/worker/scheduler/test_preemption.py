"""When pages run out: who gives way, and how little is lost."""

import random

import numpy as np
import pytest

from pipeline.budget import Budget
from tests.worker.driver import prompt
from worker.messages import SamplingParams
from worker.scheduler.step_builder import StepBuilder


def test_preempts_the_latest_and_loses_nothing(drive, crowded):
    d = drive(num_pages=12, token_budget=64)
    for i in range(4):
        d.add(str(i), prompt(8, seed=i), max_tokens=24)
    d.run()
    assert d.scheduler.load().preemptions > 0
    assert all(d.tokens(str(i)) == d.executor.generate(prompt(8, seed=i), 24) for i in range(4))
    assert next(name for name in d.outputs if d.reason(name)) == "0"


def test_a_sequence_counts_as_preempted_until_it_runs_again(drive, crowded):
    d = drive(num_pages=12, token_budget=64)
    for i in range(4):
        d.add(str(i), prompt(8, seed=i), max_tokens=24)
    preempted = set()
    while d.scheduler.has_work or d.flight:
        d.step()
        preempted |= {seq.request_id for seq in d.scheduler._waiting if seq.is_preempted}
        assert not any(seq.is_preempted for seq in d.scheduler.running)
    assert preempted and all(d.reason(name) == "length" for name in preempted)


def test_preempts_the_lowest_priority(drive):
    d = drive(num_pages=12, token_budget=64)
    d.add("low", prompt(16, seed=1), max_tokens=30, priority=-1)
    d.step()
    d.add("high", prompt(8, seed=2), max_tokens=30, priority=1)
    finished = []
    while d.scheduler.has_work:
        d.step()
        finished += [name for name in ("low", "high") if d.reason(name) and name not in finished]
    assert finished == ["high", "low"]
    assert d.scheduler.load().preemptions > 0
    assert d.tokens("low") == d.executor.generate(prompt(16, seed=1), 30)


def test_who_gives_way_to_a_chunk_is_not_in_the_step(drive, crowded):
    """Nor does its time count there, which the driver looks at in every step."""
    d = drive(num_pages=4, token_budget=8)
    d.add("early", prompt(9, seed=1), max_tokens=4)
    d.add("late", prompt(4, seed=2), max_tokens=4)
    chunks = [[(c.start, len(c.token_ids)) for c in plan.chunks] for plan in d.run()]
    assert chunks[:3] == [[(0, 4), (0, 4)], [(4, 1), (4, 4)], [(8, 1)]], "the third has no decode of the late one"
    assert d.scheduler.load().preemptions == 1
    assert d.tokens("late") == d.executor.generate(prompt(4, seed=2), 4)


@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 1}, {"pooling": "mean"}], ids=["logits of the prompt", "hidden states"]
)
def test_who_gives_way_gives_back_its_rows_of_the_step(drive, monkeypatch, asked):
    for rows in ("PROMPT_LOGIT_ROWS", "HIDDEN_ROWS"):
        monkeypatch.setattr(f"worker.scheduler.step_builder.{rows}", 9)
    d = drive(token_budget=4)
    for name in "ab":
        d.add(name, prompt(20, seed=ord(name)), sampling=SamplingParams(max_tokens=1, **asked))
    d.step()
    (first, *_), builder = d.scheduler.running, StepBuilder(Budget(64), d.scheduler.kv_cache, d.scheduler._table)
    whole = builder.limit(first)
    builder.add(first, 6)
    assert builder.limit(first) == whole - 6
    builder.preempt(first)
    assert builder.limit(first) == whole
    builder.preempt(first)
    assert builder.limit(first) == whole, "a sequence that is not in the step has nothing to give back"


def test_a_draft_that_gives_way_gives_back_its_rows_of_the_step(drive):
    d = drive()
    d.add("a", prompt(4), max_tokens=9)
    d.step()
    (seq,), builder = d.scheduler.running, StepBuilder(Budget(1000), d.scheduler.kv_cache, d.scheduler._table)
    whole = builder.draft_room
    builder.budget.take_decodes(d.scheduler._table.num_computed[[seq.row]])
    builder.add_decodes(np.array([seq.row]))
    builder.add_drafts({seq: [1, 2]})
    assert builder.draft_room < whole
    builder.preempt(seq)
    assert builder.draft_room == whole


def test_eviction_comes_before_preemption(drive):
    d = drive(num_pages=12)
    for i in range(10):
        d.add(str(i), prompt(16, seed=i), max_tokens=8)
        d.run()
    assert d.scheduler.load().preemptions == 0
    assert all(d.tokens(str(i)) == d.executor.generate(prompt(16, seed=i), 8) for i in range(10))


@pytest.mark.parametrize("known", [True, False], ids=["known lengths", "guessed lengths"])
def test_under_pressure_few_are_preempted_and_few_pages_lie_idle(drive, known):
    """200 requests in a cache that holds a tenth of them. Either nothing but the limit ends them, or a limit far above
    what they produce, a third of it on average, which is to be learnt."""
    rng = random.Random(1)
    d = drive(
        num_pages=300,
        page_size=4,
        token_budget=64,
        max_running=64,
        eos=() if known else (49,),
        scheduling_policy="fcfs",
    )
    lengths = {str(i): rng.randrange(10, 60) for i in range(200)}
    for name, length in lengths.items():
        d.add(name, prompt(rng.randrange(8, 60), seed=int(name)), max_tokens=length if known else 100)
    held, steps = 0, 0
    while d.scheduler.has_work or d.flight:
        for seq in d.scheduler.running:
            if not known and seq.num_known - seq.num_prompt >= lengths[seq.request_id] - 1:
                seq.stop_ids = frozenset(range(50))  # whatever comes next is its end
                d.scheduler._stop_checker._num_stopped_by[:] = 1000
        d.step()
        if len(d.scheduler._waiting):
            held += d.executor.num_pages - d.scheduler.kv_cache.num_available
            steps += 1
    assert d.scheduler.load().finished == 200
    assert d.scheduler.load().preemptions <= (4 if known else 10)
    assert held / steps > (0.85 if known else 0.7) * d.executor.num_pages


def test_resumes_from_what_is_still_cached(drive, crowded):
    d = drive(num_pages=16, token_budget=64)
    d.add("a", prompt(8, seed=1), max_tokens=40)
    d.add("b", prompt(8, seed=2), max_tokens=40)
    plans = d.run()
    assert d.scheduler.load().preemptions > 0
    assert d.outputs["b"][0].cached_tokens == 0
    resets = [c for plan in plans for c in plan.chunks if c.num_kept_pages == 0 and c.start > 0]
    assert resets, "nothing was resumed from the cache"
