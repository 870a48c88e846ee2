"""Which of the waiting sequences goes next."""

import pytest

from tests.worker.driver import Driver, prompt
from worker.lengths.predictor import MIN_LEARNED_REQUESTS
from worker.messages import Generate, Grammar, SamplingParams
from worker.scheduler.admission import PREDICTED_SEQUENCES, UNKNOWN_TOKENS
from worker.scheduler.waiting_queue import AGEING_TOKENS_S, JOB_PROMPT_WORK


def order_of(d: Driver) -> list[str]:
    """Request ids in the order of their first tokens."""
    d.run()
    return [name for name, outputs in d.outputs.items() if outputs[0].token_ids]


def test_higher_priority_first_then_arrival(drive):
    d = drive(max_running=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)):
        d.add(name, prompt(6, seed=ord(name)), priority=priority, max_tokens=1)
    assert order_of(d) == ["c", "e", "a", "b", "d"]


def test_who_lacks_the_fewest_tokens_goes_first_until_one_starves(drive):
    """What is cached of a prompt is none of them."""
    d = drive(max_running=1, starvation_s=5.0)
    d.add("warm", prompt(40), max_tokens=1)
    d.run()
    d.add("cold", prompt(12, seed=1), max_tokens=1)
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


@pytest.mark.parametrize(("later_s", "order"), [(0.01, ["warm", "short", "long"]), (0.1, ["warm", "long", "short"])])
def test_a_second_of_waiting_is_worth_so_many_tokens(drive, later_s, order):
    """100 fewer are worth 0.04 s."""
    assert AGEING_TOKENS_S == 2500
    d = drive(num_pages=64, token_budget=8)
    d.add("warm", prompt(6), max_tokens=1)
    d.add("long", prompt(108, seed=1), max_tokens=1)
    d.now_s = later_s
    d.add("short", prompt(8, seed=2), max_tokens=1)
    assert order_of(d) == order


@pytest.mark.parametrize(("head_start_s", "order"), [(0.0, ["short", "long"]), (0.05, ["long", "short"])])
def test_a_head_start_is_worth_as_much_as_waiting(drive, head_start_s, order):
    """It changes nothing about priorities."""
    d = drive(num_pages=64, token_budget=8)
    d.add("long", prompt(108, seed=1), max_tokens=1, head_start_s=head_start_s)
    d.add("short", prompt(8, seed=2), max_tokens=1)
    assert order_of(d) == order
    d.add("low", prompt(8, seed=3), max_tokens=1, priority=-1, head_start_s=2.0)
    d.add("normal", prompt(8, seed=4), max_tokens=1)
    assert order_of(d) == [*order, "normal", "low"]


@pytest.mark.parametrize(
    ("now_s", "order"), [(0.01, ["short", "long"]), (0.1, ["long", "short"]), (6.0, ["long", "short"])]
)
def test_a_long_prompt_that_runs_lets_a_short_one_pass(drive, now_s, order):
    """But not for ever: who has waited for long goes on."""
    d = drive(num_pages=96, token_budget=16)
    d.add("long", prompt(160, seed=1), max_tokens=1)
    d.step()
    d.now_s = now_s
    d.add("short", prompt(12, seed=2), max_tokens=1)
    assert order_of(d) == order
    assert d.tokens("long") == d.executor.generate(prompt(160, seed=1), 1)


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
    assert d.tokens("b") == d.executor.generate([*prompt(40), 1], 2)


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


def test_least_work_first_for_jobs_of_which_the_first_count(drive):
    """A prompt token counts as two output tokens, and a cached one as none. Jobs run one after the other, whoever their
    clients are, and nobody starves within one."""
    assert JOB_PROMPT_WORK == 2.0
    d = drive(max_running=1, num_pages=600, schedule="offline", finish="most", starvation_s=5.0)
    d.add("warm", prompt(40), sampling=known(1))
    d.run()
    for now_s, name, length, seed, most in (
        (10.0, "long", 6, 1, 60),
        (10.0, "short", 6, 2, 9),
        (11.0, "prompt", 40, 3, 9),  # 80 + 9, more than 12 + 60
        (12.0, "cached", 40, 0, 9),
        (16.0, "later", 6, 4, 1),
    ):
        d.now_s = now_s
        d.add(name, prompt(length, seed=seed), sampling=known(most), client=name)
    d.now_s = 900.0
    assert order_of(d) == ["warm", "cached", "short", "long", "prompt", "later"]


# ---------------------------------------------------------------- while slots are short


def known(most: int) -> SamplingParams:
    """Of an output that nothing but its limit ends."""
    return SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)


def test_the_least_work_goes_first_among_equal_waits(drive):
    """Work is the output, and the prompt in chunks of 512."""
    d = drive(max_running=1, num_pages=600, token_budget=2048)
    for name, length, most in (
        ("first", 6, 40),
        ("long", 6, 30),
        ("prompt", 2000, 9),
        ("short", 6, 9),
        ("equal", 6, 9),
    ):
        d.add(name, prompt(length, seed=ord(name[1])), sampling=known(most))
    assert order_of(d) == ["short", "equal", "prompt", "long", "first"]


@pytest.mark.parametrize(("later_s", "order"), [(10.0, ["short", "long"]), (150.0, ["long", "short"])])
def test_who_has_waited_long_for_his_work_goes_first(drive, later_s, order):
    """All count as having waited as much longer as the longest wait is, and 20 seconds at least: 30 s to 20 s is less
    than 13 to 10 squared, and 300 s to 150 s is more."""
    d = drive(max_running=1, starvation_s=1000.0)
    d.add("runs", prompt(6), sampling=known(20))
    d.step()
    d.add("long", prompt(6, seed=1), sampling=known(13))
    d.now_s = later_s
    d.add("short", prompt(6, seed=2), sampling=known(10))
    d.now_s = later_s + 0.01
    assert order_of(d) == ["runs", *order]


def test_much_less_work_goes_first_however_long_others_wait(drive):
    """Before they starve: twice as long a wait is worth no more than 1.41 times the work."""
    d = drive(max_running=1, starvation_s=100_000.0)
    d.add("runs", prompt(6), sampling=known(20))
    d.step()
    d.add("long", prompt(6, seed=1), sampling=known(15))
    d.now_s = 90_000.0
    d.add("short", prompt(6, seed=2), sampling=known(10))
    assert order_of(d) == ["runs", "short", "long"]


@pytest.mark.parametrize(("waited_s", "order"), [(34.0, ["short", "long"]), (36.0, ["long", "short"])])
def test_nobody_starves_while_short_ones_come(drive, waited_s, order):
    """A second for each token of work, and `starvation_s`: then the first that came goes first."""
    d = drive(max_running=1, starvation_s=5.0)
    d.add("runs", prompt(6), sampling=known(20))
    d.step()
    d.add("long", prompt(6, seed=1), sampling=known(30))
    d.now_s = waited_s
    d.add("short", prompt(6, seed=2), sampling=known(2))
    assert order_of(d) == ["runs", *order]


def test_a_limit_that_says_nothing_is_no_long_work(drive):
    """Before lengths are known, the context's limit counts as little more than a common limit does."""
    d = drive(max_running=1, eos=(7,), num_pages=600)
    d.add("open", prompt(6, seed=1), max_tokens=100_000)
    d.add("later", prompt(6, seed=2), max_tokens=2000)
    assert [seq.expected_tokens - seq.num_tokens for seq in d.scheduler._waiting.queue] == [UNKNOWN_TOKENS] * 2


@pytest.mark.parametrize("learned", [False, True])
def test_choices_bound_what_is_expected_of_an_output(drive, learned):
    """Cold, and after outputs of 500 tokens."""
    d = drive(max_running=1, eos=(7,), num_pages=600)
    for _ in range(MIN_LEARNED_REQUESTS * learned):
        lengths = d.scheduler.lengths
        lengths.ended(lengths.arrived(Generate(request_id="", prompt_ids=[1], sampling=known(500))), 500, False)
    choice = SamplingParams(max_tokens=1000, grammar=Grammar("choice", '["yes", "no"]'))
    d.add("open", prompt(6, seed=1), max_tokens=1000)
    d.add("choice", prompt(6, seed=2), sampling=choice)
    expected = [seq.expected_tokens - seq.num_tokens for seq in d.scheduler._waiting.queue]
    assert expected[0] > 100 and 1 <= expected[1] <= 4


def test_priority_and_preemption_come_before_work(drive):
    d = drive(max_running=1)
    d.add("runs", prompt(6), sampling=known(20))
    d.step()
    d.add("short", prompt(6, seed=1), sampling=known(2))
    d.add("long", prompt(6, seed=2), sampling=known(20), priority=1)
    assert order_of(d) == ["runs", "long", "short"]


def test_a_prompt_that_is_cached_is_little_work(drive):
    d = drive(max_running=1, num_pages=600, token_budget=2048)
    d.add("warm", prompt(1000), sampling=known(3))
    d.run()
    d.add("cold", prompt(1000, seed=1), sampling=known(3))
    d.add("cached", prompt(1000), sampling=known(3))
    assert order_of(d) == ["warm", "cached", "cold"]


def test_first_come_first_served(drive):
    d = drive(max_running=1, scheduling_policy="fcfs")
    for name, most in (("a", 30), ("b", 2), ("c", 10)):
        d.add(name, prompt(6, seed=ord(name)), sampling=known(most))
    assert order_of(d) == ["a", "b", "c"]


def teach(d: Driver) -> None:
    """Prompts that begin with 1 have long outputs, those that begin with 2 short ones."""
    lengths = d.scheduler.lengths
    for i in range(70):
        for first, produced in ((1, 50), (2, 3)):
            request = Generate(request_id=str(i), prompt_ids=[first, 5], sampling=SamplingParams(max_tokens=60))
            lengths.ended(lengths.arrived(request), produced, was_cut=False)


def test_lengths_are_learned_from_what_ends(drive):
    """After some have ended, new ones wait for those with short ones."""
    d = drive(max_running=1, eos=(7,))
    lengths = d.scheduler.lengths
    assert d.scheduler.load().length_tau is None
    teach(d)
    load = d.scheduler.load()
    assert load.length_tau is not None and load.length_tau > 0.6, "tau-b of two lengths is at most 0.71"
    assert load.length_ratio == pytest.approx(1.0, abs=0.3)
    learned = lengths.num_learned
    d.add("long", [1, 5], max_tokens=60)
    d.add("short", [2, 5], max_tokens=60)
    assert order_of(d) == ["short", "long"]
    assert lengths.num_learned == learned + 2
    d.add("known", [2, 5], sampling=known(3))
    d.run()
    assert lengths.num_learned == learned + 2  # its length tells nothing about others


def test_those_that_wait_are_predicted_again_as_others_end(drive):
    """A few for each output that ends, in turn: those of a job arrive before anything has been learned."""
    d = drive(max_running=1, eos=(7,), schedule="offline", finish="most")
    d.add("runs", prompt(6), max_tokens=2)
    d.step()
    for number in range(2 * PREDICTED_SEQUENCES):
        d.add(f"long {number}", [1, 5], max_tokens=60)
    d.add("short", [2, 5], max_tokens=60)
    d.add("known", [2, 5], sampling=known(9))
    waiting = list(d.scheduler._waiting.queue)
    assert {seq.expected_tokens for seq in waiting[:-1]} == {waiting[0].expected_tokens}
    teach(d)
    while not d.reason("runs"):
        d.step()
    count = PREDICTED_SEQUENCES
    assert [seq.estimate is not None for seq in waiting] == [True] * count + [False] * (count + 2)
    for _ in range(2):
        d.scheduler._waiting.predict_again(d.scheduler.lengths)
    assert [seq.estimate is not None for seq in waiting] == [True] * (2 * PREDICTED_SEQUENCES + 1) + [False]
    short, known_one = waiting[-2:]
    assert short.expected_tokens < known_one.expected_tokens < waiting[0].expected_tokens
