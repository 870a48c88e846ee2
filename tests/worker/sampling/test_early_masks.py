"""Grammars on a thread of their own: the same tokens as without it, and no mask filled twice."""

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.sampling.test_sampler import EOS, VOCAB, WordGrammar, accept_tokens, fill_masks, free, greedy
from worker.messages import SamplingParams
from worker.sampling.early_masks import EarlyMasks
from worker.sampling.pending_sample import PendingSample
from worker.sampling.sampler import Sampler
from worker.structured_output import GrammarError

SLOTS = 6


class Masks:
    """Stands in for `fill_masks`. Notes for how many outputs it was called, and whether on the main thread. May wait or
    fail first."""

    def __init__(self) -> None:
        self.filled: list[int] = []
        self.on_main: list[bool] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.error: Exception | None = None

    def __call__(self, states: list[WordGrammar], *others: Any) -> dict[int, GrammarError]:
        self.filled.append(len(states))
        self.on_main.append(threading.current_thread() is threading.main_thread())
        assert self.may_go.wait(30)
        if self.error is not None:
            raise self.error
        return fill_masks(states, *others)


@pytest.fixture(autouse=True)
def masks(monkeypatch: pytest.MonkeyPatch) -> Masks:
    masks = Masks()
    monkeypatch.setattr("worker.sampling.token_bitmask.fill_masks", masks)
    monkeypatch.setattr("worker.sampling.sampling_metadata.accept_tokens", accept_tokens)
    return masks


def launched(sampler: Sampler, *slots: int) -> PendingSample:
    return sampler.launch(torch.zeros(len(slots), VOCAB), np.array(slots))


def begun(sampler: Sampler, *slots: int) -> PendingSample:
    pending = launched(sampler, *slots)
    pending.begin()
    return pending


def word(chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.randrange(6, VOCAB) for _ in range(chance.randrange(1, 6)))


def play(early: bool, seed: int) -> list[Any]:
    """Random steps of sequences that come, end, and lose their slot to another while a step is in flight."""
    chance, said = random.Random(seed), list[Any]()
    noise = torch.Generator().manual_seed(seed)
    sampler = Sampler(SLOTS, VOCAB, "cpu", early_masks=early)
    grammars: dict[int, WordGrammar | None] = {}
    pending: PendingSample | None = None
    members: list[tuple[int, WordGrammar | None]] = []
    for _ in range(40):
        for slot in range(SLOTS):
            if slot in grammars and chance.random() < 0.1:
                sampler.remove(slot)
                del grammars[slot]
        begins = chance.random() < 0.9
        if pending is not None and early and begins:
            pending.begin()
        for slot in range(SLOTS):
            if slot not in grammars and chance.random() < 0.5:
                grammars[slot] = WordGrammar(*(word(chance) for _ in range(3))) if chance.random() < 0.8 else None
                kinds: list[SamplingParams] = [
                    greedy(),
                    free(seed=slot),
                    free(seed=slot, top_p=0.9),
                    greedy(min_tokens=2),
                ]
                sampler.add(slot, chance.choice(kinds), [], [], EOS, grammars[slot])
        if pending is not None:
            result = pending.result()
            said.append((result.token_ids.tolist(), sorted(result.failures), result.complete))
            for number, (slot, grammar) in enumerate(members):
                if number in result.complete and grammars.get(slot) is grammar:
                    sampler.remove(slot)
                    del grammars[slot]
        members = [(slot, grammars[slot]) for slot in chance.sample(sorted(grammars), len(grammars))]
        slots = np.array([slot for slot, _ in members], dtype=np.int64)
        pending = sampler.launch(torch.randn(len(slots), VOCAB, generator=noise), slots) if len(slots) else None
    return said


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_one_thread(seed: int) -> None:
    assert play(early=True, seed=seed) == play(early=False, seed=seed)


def test_masks_are_filled_ahead_of_the_launch(masks: Masks) -> None:
    sampler = Sampler(2, VOCAB, "cpu", early_masks=True)
    sampler.add(0, greedy(), [], [], EOS, WordGrammar((10, 11, 12)))
    first = begun(sampler, 0)
    assert first.result().token_ids.tolist() == [10]
    first.settle()
    assert masks.filled == [1, 1]  # the first mask, and the one after the token
    sampler.add(1, greedy(), [], [], EOS, WordGrammar((20,)))
    both = begun(sampler, 0, 1)
    assert masks.filled[:3] == [1, 1, 1]  # the new output's alone
    assert both.result().token_ids.tolist() == [11, 20]
    both.settle()
    assert masks.filled == [1, 1, 1, 2]
    assert masks.on_main == [True, False, True, False]


def test_the_result_waits_for_no_mask_and_the_next_launch_for_all(
    masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(2, VOCAB, "cpu", early_masks=True)
    for slot, word in enumerate([(40, 41), (60, 61)]):
        sampler.add(slot, greedy(), [], [], EOS, WordGrammar(word))
    pending = launched(sampler, 0, 1)
    masks.may_go.clear()
    pending.begin()
    assert pending.result().token_ids.tolist() == [40, 60]
    settle = EarlyMasks.settle

    def open_first(early: EarlyMasks) -> None:
        masks.may_go.set()  # only one who waits lets the masks be filled
        settle(early)

    monkeypatch.setattr(EarlyMasks, "settle", open_first)
    assert launched(sampler, 0, 1).result().token_ids.tolist() == [41, 61]
    assert masks.on_main == [True, False]


def test_a_launch_that_is_not_begun_leaves_grammars_to_the_main_thread(masks: Masks) -> None:
    sampler = Sampler(1, VOCAB, "cpu", early_masks=True)
    sampler.add(0, greedy(), [], [], EOS, WordGrammar((10, 11)))
    assert launched(sampler, 0).result().token_ids.tolist() == [10]
    assert launched(sampler, 0).result().token_ids.tolist() == [11]
    assert masks.on_main == [True, True]


def test_inserted_tokens_make_a_mask_stale(masks: Masks) -> None:
    sampler = Sampler(1, VOCAB, "cpu", early_masks=True)
    sampler.add(0, greedy(), [], [], EOS, WordGrammar((10, 11, 12)))
    pending = begun(sampler, 0)
    pending.result()
    pending.settle()
    sampler.insert(0, [11])
    assert launched(sampler, 0).result().token_ids.tolist() == [12]
    assert masks.on_main == [True, False, True]


def test_a_slot_that_is_freed_meanwhile_and_has_a_new_owner(masks: Masks) -> None:
    sampler = Sampler(2, VOCAB, "cpu", early_masks=True)
    sampler.add(0, greedy(), [], [], EOS, WordGrammar((40, 41)))
    sampler.add(1, greedy(), [], [], EOS, WordGrammar((50, 51)))
    old = launched(sampler, 0, 1)
    sampler.remove(0)  # an abort between two turns
    masks.may_go.clear()
    old.begin()
    sampler.add(0, greedy(), [], [], EOS, WordGrammar((60, 61)))
    assert old.result().token_ids.tolist() == [40, 50]
    masks.may_go.set()
    assert begun(sampler, 0, 1).result().token_ids.tolist() == [60, 51]
    assert begun(sampler, 0).result().token_ids.tolist() == [61]


def test_an_output_that_ends_gets_no_mask(masks: Masks) -> None:
    sampler = Sampler(2, VOCAB, "cpu", early_masks=True)
    sampler.add(0, greedy(), [], [40], EOS, WordGrammar((40,)))
    sampler.add(1, greedy(), [], [], EOS, WordGrammar((50, 51)))
    pending = begun(sampler, 0, 1)
    assert pending.result().complete == [0]
    pending.settle()
    assert masks.filled == [2, 1]


def test_errors_are_those_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that a grammar does not take fails its row at once; a grammar that allows none, at the next launch."""
    sampler = Sampler(3, VOCAB, "cpu", early_masks=True)
    grammars = [WordGrammar((40, 41)), WordGrammar((50, 51)), WordGrammar((60, 61))]
    for slot, grammar in enumerate(grammars):
        sampler.add(slot, greedy(), [], [], EOS, grammar)
    pending = launched(sampler, 2, 1, 0)
    grammars[1].words = ((7, 8),)
    monkeypatch.setattr(grammars[2], "allowed", lambda: set() if grammars[2].num_tokens else {60})
    pending.begin()
    assert {i: failure.kind for i, failure in pending.result().failures.items()} == {1: "internal"}
    sampler.remove(1)
    after = launched(sampler, 0, 2).result()
    assert after.token_ids[0] == 41
    assert {i: failure.kind for i, failure in after.failures.items()} == {1: "invalid"}


def test_a_step_with_drafts_takes_rows_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.sampling.token_bitmask.fill_masks_after", lambda *_: [0])
    sampler = Sampler(2, VOCAB, "cpu", early_masks=True)
    for slot, words in enumerate([(10, 11, 12, 13), (20, 21, 22, 23)]):
        sampler.add(slot, greedy(), [], [], EOS, WordGrammar(words))
    assert begun(sampler, 0, 1).result().token_ids.tolist() == [10, 20]
    drafted = sampler.launch(torch.zeros(3, VOCAB), np.array([1, 1, 0]), draft_ids=np.array([22, -1, -1])).result()
    assert drafted.token_ids.tolist() == [21, 11]
    assert begun(sampler, 1, 0).result().token_ids.tolist() == [22, 12]


def test_an_error_of_the_thread_is_raised_where_its_work_is_used(masks: Masks, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no tokens")

    sampler = Sampler(1, VOCAB, "cpu", early_masks=True)
    sampler.add(0, greedy(), [], [], EOS, WordGrammar((40, 41, 42)))
    pending = launched(sampler, 0)
    masks.error = RuntimeError("no masks")
    pending.begin()
    assert pending.result().token_ids.tolist() == [40]
    with pytest.raises(RuntimeError, match="no masks"):
        launched(sampler, 0)
    masks.error = None
    pending = launched(sampler, 0)  # the error was that launch's alone
    monkeypatch.setattr("worker.sampling.sampling_metadata.accept_tokens", broken)
    pending.begin()
    with pytest.raises(RuntimeError, match="no tokens"):
        pending.result()
