"""The drafter of texts that came before, against the longest suffix found by comparing everything with everything."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.drafts import suffix_automaton as automata
from worker.drafts.suffix import SuffixDrafter

TEXT = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=60))
FORMER = st.lists(TEXT, max_size=4)


def ends(texts: list[list[int]], suffix: list[int]) -> list[tuple[int, int]]:
    """Where a suffix ends in texts: text and index behind it."""
    size = len(suffix)
    return [(i, e) for i, text in enumerate(texts) for e in range(size, len(text) + 1) if text[e - size : e] == suffix]


def longest(text: list[int], others: list[list[int]]) -> int:
    """Length of the longest suffix of `text` that occurs in `others`, or earlier in `text`."""
    return next(n for n in range(len(text), -1, -1) if n == 0 or elsewhere(text, n, others))


def elsewhere(text: list[int], size: int, others: list[list[int]]) -> list[tuple[int, int]]:
    texts = [text, *others]
    return [place for place in ends(texts, text[len(text) - size :]) if place != (0, len(text))]


def drafter(**settings: int) -> SuffixDrafter:
    return SuffixDrafter(**{"own_tokens": 1 << 14, "shared_tokens": 1 << 12, **settings})


def length_of(evidence: int) -> range:
    return [range(1, 2), range(2, 3), range(3, 5), range(5, 9), range(9, 17), range(17, 1 << 20)][evidence % 6]


@given(FORMER, TEXT, TEXT)
def test_the_longest_suffix_is_found(former: list[list[int]], prompt: list[int], output: list[int]) -> None:
    """Of own text and of former outputs, after each token; and a proposal is what follows such a suffix somewhere."""
    drafts = drafter()
    for key, text in enumerate(former):
        drafts.add(key, [9], [], [], None)
        drafts.extend(key, text)
        drafts.remove(key)
    drafts.add(99, prompt, [], [], None)
    for count in range(len(output) + 1):
        proposal = drafts.propose(99, 8)
        own = longest(prompt + output[:count], [])
        # In the replica's texts only output is looked for, which is among them itself.
        shared = longest(output[:count], former)
        if max(own, shared) == 0:
            assert proposal.token_ids == []
        elif proposal.token_ids:
            source = (prompt + output[:count], [], own) if own >= shared else (output[:count], former, shared)
            text, others, length = source
            assert length in length_of(proposal.evidence) and proposal.evidence // 6 == (shared > own)
            texts = [text, *others]
            found = elsewhere(text, length, others)
            following = [texts[i][end] for i, end in found if end < len(texts[i])]
            if following:
                assert proposal.token_ids[0] in following
                # The most frequent, whatever the order.
                assert following.count(proposal.token_ids[0]) == max(map(following.count, following))
            else:
                assert length > 4  # a shorter suffix was taken where the longer one ended a text
        drafts.extend(99, output[count : count + 1])


@given(FORMER)
def test_texts_that_grow_by_turns_are_all_there(texts: list[list[int]]) -> None:
    """A place that a sequence keeps stays right when other sequences split its state."""
    automaton = automata.new_automaton(sum(map(len, texts)))
    lasts = [0] * len(texts)
    for count in range(max(map(len, texts), default=0)):
        for i, text in enumerate(texts):
            lasts[i] = automata.extend(automaton, np.array(text[count : count + 1], dtype=np.int32), lasts[i], 1)
    for text in texts:
        for first in range(len(text)):
            part = np.array(text[first:], dtype=np.int32)
            state, length = automata.match(automaton, part, 0, 0)
            assert length == len(part)
            assert automaton[16 + 8 * state + automata.COUNT] == len(ends(texts, text[first:]))
    states, tokens = int(automaton[automata.STATES]), sum(map(len, texts))
    assert states <= 2 * tokens + 1 and automaton[automata.EDGES] <= 2 * tokens


def test_what_repeats_goes_on_repeating() -> None:
    drafts = drafter()
    drafts.add(1, [7, 8, 9], [], [], None)
    drafts.extend(1, [1, 2, 3, 4, 5] * 4)
    assert drafts.propose(1, 12).token_ids == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]


def test_the_most_frequent_continuation_then_the_latest() -> None:
    drafts = drafter()
    drafts.add(1, [5, 1, 6, 5, 2, 7, 5], [], [], None)
    assert drafts.propose(1, 1).token_ids == [2]
    drafts.add(2, [5, 1, 6, 5, 1, 8, 5, 2, 7, 5], [], [], None)
    assert drafts.propose(2, 1).token_ids == [1]


def test_a_prediction_is_proposed_while_it_comes_true() -> None:
    drafts = drafter()
    prediction = [10, 11, 12, 13, 14, 15, 16]
    drafts.add(1, [1, 2, 3], [], prediction, None)
    assert drafts.propose(1, 3) == ([10, 11, 12], drafts.num_evidence - 1)
    drafts.extend(1, [10, 11])
    assert drafts.propose(1, 9) == ([12, 13, 14, 15, 16], drafts.num_evidence - 1)
    drafts.extend(1, [99])
    assert drafts.propose(1, 9).token_ids == []
    drafts.extend(1, [14])
    assert drafts.propose(1, 9) == ([15, 16], 0)  # found again
    drafts.extend(1, [15, 16])
    assert drafts.propose(1, 9).token_ids == []  # the prompt does not follow the prediction


def test_outputs_teach_others_prompts_do_not() -> None:
    drafts = drafter()
    drafts.add(1, [21, 22, 23, 24], [], [], None)
    drafts.extend(1, [31, 32, 33, 34])
    drafts.add(2, [1], [], [], None)
    drafts.extend(2, [31])
    assert drafts.propose(2, 4).token_ids == []  # a sequence's output is read when something is proposed for it
    drafts.propose(1, 1)
    drafts.extend(2, [32])
    assert drafts.propose(2, 4) == ([33, 34], 6)
    drafts.remove(1)
    drafts.add(3, [1], [], [], None)
    drafts.extend(3, [22])
    assert drafts.propose(3, 4).token_ids == []
    drafts.extend(3, [32])
    assert drafts.propose(3, 4) == ([33, 34], 6)
    drafts.remove(2)
    drafts.remove(3)
    drafts.add(4, [1], [31, 32], [], None)  # preempted, and resumed
    assert drafts.propose(4, 1) == ([33], 7)


def test_a_resumed_sequence_goes_on() -> None:
    drafts = drafter()
    drafts.add(1, [1, 2, 3], [4, 5, 1, 2], [], None)
    assert drafts.propose(1, 3).token_ids == [3, 4, 5]
    drafts.remove(1)
    drafts.add(1, [9], [], [], None)
    assert drafts.propose(1, 3).token_ids == []


def test_a_long_prompt_is_read_over_several_calls() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50_000, 5000).tolist()
    drafts = drafter(tokens_a_call=512)
    drafts.add(1, prompt, [], [], None)
    drafts.extend(1, prompt[100:104])
    first = drafts.propose(1, 4)
    assert first == (prompt[104:108], 2)  # what was read already is of use
    drafts.extend(1, prompt[104:105])
    drafts.extend(1, prompt[4000:4006])
    calls = next(i for i in range(20) if drafts.propose(1, 4) == (prompt[4006:4010], 3))
    assert 5 <= calls <= 9
    # The output is read in its turn, after the prompt.
    drafts.extend(1, prompt[103:104])
    assert drafts.propose(1, 9).token_ids[:2] == prompt[104:106]
    drafts.propose(1, 1)
    assert drafts.propose(1, 9).token_ids[:4] == [prompt[104], *prompt[4000:4003]]


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_bounded(seed: int) -> None:
    """Whatever sequences come and go, texts take no more than their room, and room that was free is free again."""
    rng = np.random.default_rng(seed)
    own_tokens, shared_tokens = 6000, 2000
    drafts = drafter(own_tokens=own_tokens, shared_tokens=shared_tokens, tokens_a_call=300)
    running: list[int] = []
    allocated = 0
    for key in range(120):
        drafts.add(key, rng.integers(0, 9, int(rng.integers(0, 900))).tolist(), [], [], None)
        running.append(key)
        for one in running:
            drafts.extend(one, rng.integers(0, 9, int(rng.integers(0, 60))).tolist())
            assert len(drafts.propose(one, 5).token_ids) <= 5
        while len(running) > rng.integers(1, 14):
            drafts.remove(running.pop(int(rng.integers(len(running)))))
        own = [text.own for text in drafts._texts.values() if text.own is not None]
        allocated = max(allocated, sum(int(each[automata.CAPACITY]) for each in own))
        assert sum(each.nbytes for each in own) <= 110 * own_tokens
        assert drafts._new.nbytes + drafts._old.nbytes <= 110 * shared_tokens
        assert drafts._waiting_tokens <= shared_tokens
    assert own_tokens / 2 < allocated <= own_tokens
    assert drafts._generation > 3
    for one in running:
        drafts.remove(one)
    assert drafts._free_tokens == own_tokens


def test_where_there_is_no_room_the_end_of_the_prompt_counts() -> None:
    drafts = drafter(own_tokens=600)
    prompt = list(range(1000))
    drafts.add(1, prompt, [], [], None)
    drafts.extend(1, [990, 991])
    assert drafts.propose(1, 3).token_ids == [992, 993, 994]
    drafts.extend(1, [10, 11])
    assert drafts.propose(1, 3).token_ids == []
    drafts.add(2, prompt, [], [], None)
    drafts.extend(2, [990, 991])
    assert drafts.propose(2, 3) == ([10, 11], 7)  # from the other's output
    drafts.remove(1)
    drafts.add(3, prompt, [], [], None)
    drafts.extend(3, [990])
    assert drafts.propose(3, 2).token_ids == [991, 992]


def test_the_same_calls_give_the_same_proposals() -> None:
    def run() -> list[object]:
        rng, drafts, said = np.random.default_rng(1), drafter(shared_tokens=500), []
        for key in range(30):
            drafts.add(key, rng.integers(0, 5, 40).tolist(), [], [], None)
            for _ in range(8):
                drafts.extend(key, rng.integers(0, 5, 5).tolist())
                said.append(drafts.propose(key, 6))
            if key % 2:
                drafts.remove(key)
        return said

    assert run() == run()
