"""Sequences with recurrent states: where they save them, and what goes on from there. The fake executor refuses states
of other tokens than those before a chunk."""

import pytest

from tests.worker.driver import Driver, prompt
from tests.worker.fakes import copies_of
from worker.kv_layout import DEVICE
from worker.messages import SamplingParams
from worker.step import Plan


def saved(plans: list[Plan]) -> list[int]:
    """Positions at which states were saved, in the order of the plans."""
    found = []
    for plan in plans:
        found += [copy.position for copy in copies_of(plan) if copy.to_tier == DEVICE]
    return found


def cached(d: Driver, request_id: str) -> int | None:
    return d.outputs[request_id][0].cached_tokens


def check(d: Driver, request_id: str, tokens: list[int], max_tokens: int = 5) -> None:
    assert d.tokens(request_id) == d.executor.generate(tokens, max_tokens)


def test_a_prompt_is_saved_at_its_last_page_boundary(drive):
    d = drive(num_checkpoints=8, token_budget=64)
    for name, tokens in (("a", prompt(24)), ("again", prompt(24)), ("longer", [*prompt(24), 1, 2, 3])):
        d.add(name, tokens)
        plans = d.run()
        assert saved(plans) == {"a": [20], "again": [], "longer": [24]}[name]
        check(d, name, tokens)
    assert [cached(d, name) for name in ("a", "again", "longer")] == [0, 20, 20]
    load = d.scheduler.load()
    assert (load.checkpoints_total, load.checkpoints, load.checkpoints_evicted) == (8, 2, 0)
    assert load.cached_tokens == 40


def test_where_prompts_part_a_third_goes_on(drive):
    d = drive(num_checkpoints=8, token_budget=64)
    for i in range(3):
        d.add(str(i), [*prompt(17), i, i, i, i])
        plans = d.run()
        assert saved(plans) == [[20], [16, 20], [20]][i]
    assert [cached(d, str(i)) for i in range(3)] == [0, 0, 16]


@pytest.mark.parametrize("budget", [5, 64])
def test_long_prompts_and_outputs_are_saved_at_intervals_that_do_not_cut_chunks(drive, budget):
    """A prompt of 30 tokens, and 25 more, with an interval of 10 tokens that becomes 3 pages."""
    d = drive(num_checkpoints=8, token_budget=budget, checkpoint_interval=10)
    d.add("a", prompt(30), max_tokens=25)
    plans = d.run()
    assert saved(plans) == [12, 24, 28, 36, 48]
    starts = [chunk.start for plan in plans for chunk in plan.chunks if chunk.start < 30]
    assert starts == list(range(0, 30, budget))
    whole = [*prompt(30), *d.tokens("a")]
    d.add("b", whole)
    d.run()
    assert cached(d, "b") == 48
    check(d, "b", whole)


def test_choices_of_one_prompt_share_its_checkpoint(drive):
    """They wait until the first has saved it. With the prompt's last page begins what each computes for itself."""
    d = drive(num_checkpoints=4, token_budget=16, num_pages=40)
    for i in range(3):
        d.add(str(i), prompt(40), sampling=SamplingParams(max_tokens=2 + i, temperature=0))
    plans = d.run()
    assert [cached(d, str(i)) for i in range(3)] == [0, 36, 36]
    assert saved(plans) == [36]
    for i in range(3):
        check(d, str(i), prompt(40), 2 + i)


def test_prompts_that_part_before_the_next_checkpoint_do_not_wait_for_each_other(drive):
    d = drive(num_checkpoints=4, token_budget=64, num_pages=100)
    d.add("a", prompt(40))
    d.add("b", [*prompt(17), 1, 2, 3, 4, 5, 6])
    assert len(d.step()) == 2
    d.run()


@pytest.mark.parametrize(("shared", "cached_tokens"), [(34, 32), (15, 0)])
def test_prompts_that_come_at_once_go_on_where_they_part(drive, shared, cached_tokens):
    """If an eighth of the interval of 128 tokens is to be gained. A salt keeps them apart."""
    d = drive(num_checkpoints=8, token_budget=96, num_pages=100, checkpoint_interval=128)
    prompts = [[*prompt(shared), *prompt(10, seed=1 + i)] for i in range(3)]
    for i, tokens in enumerate(prompts):
        d.add(str(i), tokens)
    d.add("apart", prompts[0], cache_salt="other")
    plans = d.run()
    assert [cached(d, str(i)) for i in range(3)] == [0, cached_tokens, cached_tokens]
    assert cached(d, "apart") == 0 and saved(plans).count(32) == (cached_tokens == 32)
    for i, tokens in enumerate(prompts):
        check(d, str(i), tokens)


def test_a_preempted_sequence_goes_on_from_a_checkpoint(drive, crowded):
    d = drive(num_pages=12, token_budget=64, num_checkpoints=12, checkpoint_interval=8)
    for i in range(4):
        d.add(str(i), prompt(8, seed=i), max_tokens=24)
    plans = d.run()
    assert d.scheduler.load().preemptions > 0
    for i in range(4):
        check(d, str(i), prompt(8, seed=i), 24)
    read = [copy.position for plan in plans for copy in copies_of(plan) if copy.from_tier == DEVICE]
    assert max(read) >= 8, "tokens of outputs were not computed again"


def test_without_a_free_row_sequences_run_as_before(drive):
    """One row, which the first sequence locks while it runs."""
    d = drive(num_checkpoints=1, token_budget=64, num_pages=64)
    for i in range(3):
        d.add(str(i), prompt(12, seed=i), max_tokens=6)
        d.step()
    d.run()
    for i in range(3):
        check(d, str(i), prompt(12, seed=i), 6)
    d.add("again", prompt(12, seed=2))
    d.run()
    check(d, "again", prompt(12, seed=2))


def test_rows_of_a_sequence_that_fails_or_is_aborted_come_back(drive):
    d = drive(num_checkpoints=3, token_budget=8, num_pages=64, checkpoint_interval=4)
    for end in (d.scheduler.abort, lambda names: d.scheduler.fail(names[0], None)):
        d.add("a", prompt(30))
        d.step()
        end(["a"])
        d.land()
        d.scheduler.check_integrity()
    d.run()
    (states,) = d.tree.components
    assert states.pool.num_free + len(states.parts) == 3
