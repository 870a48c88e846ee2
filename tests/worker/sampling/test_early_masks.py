"""Grammars on a thread of their own: the same tokens as without it, and no mask filled twice."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.sampling.test_sampler import EOS, VOCAB, WordGrammar, accept_tokens, fill_masks, free, greedy
from worker.messages import SamplingParams
from worker.sampling.sampler import PendingSample, Sampler

SLOTS = 6


@pytest.fixture(autouse=True)
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of masks of each call that fills any."""
    counts: list[int] = []

    def counted(states: list[WordGrammar], *others: Any) -> Any:
        counts.append(len(states))
        return fill_masks(states, *others)

    monkeypatch.setattr("worker.sampling.token_bitmask.fill_masks", counted)
    monkeypatch.setattr("worker.sampling.sampling_metadata.accept_tokens", accept_tokens)
    return counts


def word(chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.randrange(6, VOCAB) for _ in range(chance.randrange(1, 6)))


def play(early: bool, seed: int) -> list[Any]:
    """Random steps of sequences that come, end, and lose their slot to another while a step is in flight."""
    chance, said = random.Random(seed), list[Any]()
    noise = torch.Generator().manual_seed(seed)
    sampler = Sampler(SLOTS, VOCAB, "cpu", early_masks=early)
    grammars: dict[int, WordGrammar | None] = {}
    pending: PendingSample | None = None
    launched: list[tuple[int, WordGrammar | None]] = []
    for _ in range(40):
        for slot in range(SLOTS):
            if slot in grammars and chance.random() < 0.1:
                sampler.remove(slot)
                del grammars[slot]
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
            for number, (slot, grammar) in enumerate(launched):
                if number in result.complete and grammars.get(slot) is grammar:
                    sampler.remove(slot)
                    del grammars[slot]
        launched = [(slot, grammars[slot]) for slot in chance.sample(sorted(grammars), len(grammars))]
        slots = np.array([slot for slot, _ in launched], dtype=np.int64)
        pending = sampler.launch(torch.randn(len(slots), VOCAB, generator=noise), slots) if len(slots) else None
    return said


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_one_thread(seed: int) -> None:
    assert play(early=True, seed=seed) == play(early=False, seed=seed)


def test_masks_are_filled_ahead_of_the_launch(filled: list[int]) -> None:
    sampler = Sampler(2, VOCAB, "cpu", early_masks=True)
    sampler.add(0, greedy(), [], [], EOS, WordGrammar((10, 11, 12)))
    logits = torch.zeros(1, VOCAB)
    first = sampler.launch(logits, np.array([0]))
    assert first.result().token_ids.tolist() == [10]
    assert filled == [1, 1]  # the first mask, and the one after the token
    sampler.add(1, greedy(), [], [], EOS, WordGrammar((20,)))
    both = sampler.launch(logits.expand(2, -1), np.array([0, 1]))
    assert filled[:3] == [1, 1, 1]  # the new output's alone
    assert both.result().token_ids.tolist() == [11, 20]
    assert filled == [1, 1, 1, 2]


def test_inserted_tokens_make_a_mask_stale(filled: list[int]) -> None:
    sampler = Sampler(1, VOCAB, "cpu", early_masks=True)
    sampler.add(0, greedy(), [], [], EOS, WordGrammar((10, 11, 12)))
    logits = torch.zeros(1, VOCAB)
    sampler.launch(logits, np.array([0])).result()
    sampler.insert(0, [11])
    assert sampler.launch(logits, np.array([0])).result().token_ids.tolist() == [12]
    assert filled == [1, 1, 1, 1]


def test_a_step_with_drafts_takes_rows_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.sampling.token_bitmask.fill_masks_after", lambda *_: [0])
    sampler = Sampler(2, VOCAB, "cpu", early_masks=True)
    for slot, words in enumerate([(10, 11, 12, 13), (20, 21, 22, 23)]):
        sampler.add(slot, greedy(), [], [], EOS, WordGrammar(words))
    logits = torch.zeros(2, VOCAB)
    assert sampler.launch(logits, np.array([0, 1])).result().token_ids.tolist() == [10, 20]
    drafted = sampler.launch(torch.zeros(3, VOCAB), np.array([1, 1, 0]), draft_ids=np.array([22, -1, -1])).result()
    assert drafted.token_ids.tolist() == [21, 11]
    assert sampler.launch(logits, np.array([1, 0])).result().token_ids.tolist() == [22, 12]


def test_an_error_of_the_thread_reaches_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    sampler = Sampler(1, VOCAB, "cpu", early_masks=True)
    sampler.add(0, greedy(), [], [], EOS, WordGrammar((10,)))
    monkeypatch.setattr("worker.sampling.sampling_metadata.accept_tokens", broken)
    with pytest.raises(RuntimeError, match="broken"):
        sampler.launch(torch.zeros(1, VOCAB), np.array([0])).result()
