"""Requests that a replica does not take."""

import pytest

from tests.worker.driver import prompt
from worker.messages import SamplingParams


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [50]}, "prompt", "0 to 49"),
        ({"prompt": [-1]}, "prompt", "0 to 49"),
        ({"prompt": [1 << 40]}, "prompt", "0 to 49"),
        ({"prompt": [1], "output_ids": [77]}, "prompt", "0 to 49"),
        ({"prompt": prompt(100)}, "prompt", "at most 99"),
        ({"prompt": [1], "sampling": SamplingParams(max_tokens=0)}, "max_tokens", "at least 1"),
        ({"prompt": [1], "weight": 0.0}, "weight", "above 0"),
        ({"prompt": [1], "weight": -1.0}, "weight", "above 0"),
        ({"prompt": [1], "weight": float("nan")}, "weight", "above 0"),
        ({"prompt": [1], "weight": float("inf")}, "weight", "above 0"),
        (
            {"prompt": [1], "sampling": SamplingParams(max_tokens=1, prompt_logprobs_start=1)},
            "prompt_logprobs_start",
            "0 to 0",
        ),
        ({"prompt": [1], "sampling": SamplingParams(max_tokens=2, logit_bias={50: 1.0})}, "logit_bias", "0 to 49"),
        ({"prompt": [1], "sampling": SamplingParams(max_tokens=2, stop_token_ids=(50,))}, "stop_token_ids", "0 to 49"),
    ],
)
def test_refuses_what_it_cannot_run(drive, fields, param, says):
    d = drive(context_length=100)
    d.add("good", prompt(9))
    assert not d.add("bad", **fields)
    d.run()
    failure = d.failure("bad")
    assert (failure.kind, failure.param) == ("invalid", param) and says in failure.message
    assert d.tokens("good") == d.executor.generate(prompt(9), 5)
    assert d.scheduler.load().failed == 1


def test_refuses_a_prompt_that_the_cache_cannot_hold(drive):
    d = drive(num_pages=5)
    d.scheduler.context_length = 1000
    d.add("a", prompt(20))
    d.add("b", prompt(19))
    d.run()
    assert d.failure("a").kind == "invalid" and "kv_tokens" in d.failure("a").message
    assert d.tokens("b") == d.executor.generate(prompt(19), 1)


def test_refuses_more_than_may_wait(drive):
    d = drive(max_running=1, max_waiting=2)
    d.add("a", prompt(4))
    d.step()
    assert d.add("b", prompt(5)) and d.add("c", prompt(6))
    assert not d.add("d", prompt(7))
    d.run()
    assert d.failure("d").kind == "overloaded"
    assert [d.reason(name) for name in "abc"] == ["length"] * 3


@pytest.mark.parametrize("outputs", [0, 3])
def test_a_full_queue_takes_what_was_taken_before(drive, outputs):
    """Its client waits for the rest of it, and nobody else has it."""
    d = drive(max_running=1, max_waiting=2)
    whole = d.executor.generate(prompt(7), 5)
    names = [f"resumed {i}" for i in range(6)]  # more than there was memory for
    for name in "abc":
        d.add(name, prompt(4))
    d.step()
    for name in names:
        assert d.add(name, prompt(7), output_ids=whole[:outputs], resumed=True)
    d.scheduler.check_integrity()
    assert not d.add("new", prompt(7))
    d.run()
    assert all(d.tokens(name) == whole[outputs:] for name in names)


@pytest.mark.parametrize(("step_s", "least_s", "most_s"), [(1.0, 4, 8), (60.0, 60, 60), (0.001, 1, 1)])
def test_who_is_refused_hears_when_those_who_wait_will_have_begun(drive, step_s, least_s, most_s):
    """One begins with every step, or, where what ends is noticed a step late, with every other."""
    d = drive(max_running=1, max_waiting=4)
    for i in range(40):
        d.add(str(i), prompt(4, seed=i), max_tokens=1)
        if i >= 4:
            d.step()
            d.now_s += step_s
    for name in ("room for it", "last"):
        d.add(name, prompt(4))
    d.collect()
    failure = d.failure("last")
    assert least_s <= failure.retry_after_s <= most_s and f" {failure.retry_after_s:.0f} s" in failure.message
    d.run()


def test_an_id_in_use_is_an_error(drive):
    d = drive()
    d.add("a", prompt(4))
    with pytest.raises(ValueError, match="in use"):
        d.add("a", prompt(4))
    d.run()
    d.outputs.clear()
    d.add("a", prompt(4))
    d.run()
    assert d.tokens("a") == d.executor.generate(prompt(4), 5)
