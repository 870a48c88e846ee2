"""One thread for the grammars of a batch, or several: what is quicker on this machine, with these grammars."""

from collections.abc import Callable

from worker.structured_output.matching.grammar_threads import QUICK_S, GrammarThreads

KIND, COUNT = "llguidance's masks", 100


def settled(threads: GrammarThreads, seconds: Callable[[int], float], fills: int = 130) -> list[int]:
    """The choices for as many fills, each of which takes `seconds` of its number of threads."""
    chosen = []
    for _ in range(fills):
        chosen.append(threads.choose(KIND, COUNT))
        threads.took(KIND, chosen[-1], COUNT, seconds(chosen[-1]))
    return chosen


def test_what_is_quick_takes_one_thread() -> None:
    assert set(settled(GrammarThreads(8), lambda count: 0.9 * QUICK_S)) == {1}
    assert set(settled(GrammarThreads(1), lambda count: 50 * QUICK_S)) == {1}


def test_the_quicker_way_is_taken_and_the_other_tried_now_and_then() -> None:
    for takes, usual, other in (({1: 8e-3, 8: 2e-3}, 8, 1), ({1: 4e-3, 8: 11e-3}, 1, 8)):
        chosen = settled(GrammarThreads(8), lambda count, takes=takes: takes[count])  # type: ignore[misc]
        assert 125 <= chosen.count(usual) < 130 and other in chosen[4:]


def test_a_choice_follows_the_times_and_a_single_long_one_changes_little() -> None:
    threads = GrammarThreads(8)
    settled(threads, lambda count: {1: 4e-3, 8: 5e-3}[count])
    threads.took(KIND, 1, COUNT, 1.0)  # the first mask of a large grammar
    assert settled(threads, lambda count: {1: 4e-3, 8: 5e-3}[count]).count(1) > 60
    assert settled(threads, lambda count: {1: 40e-3, 8: 5e-3}[count]).count(8) > 100


def test_kinds_of_work_are_timed_apart() -> None:
    threads = GrammarThreads(8)
    settled(threads, lambda count: {1: 4e-3, 8: 1e-3}[count])
    assert threads.choose(KIND, COUNT) == 8 and threads.choose("xgrammar's masks", COUNT) == 1


def test_work_runs_on_the_number_of_threads_that_is_chosen() -> None:
    threads, counts = GrammarThreads(8), list[int]()
    threads.took(KIND, 1, COUNT, 1.0)
    assert threads.run(KIND, COUNT, lambda count: counts.append(count) or "done") == "done"  # type: ignore[func-returns-value]
    assert counts == [8]
    assert GrammarThreads(1).run(KIND, COUNT, lambda count: count) == 1
