"""How fast prompts are computed beside decodes, against the deadlines that it is to keep."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.pacing import FULL_STEP, prompt_tokens

NONE = np.empty(0, dtype=np.int64)


def test_whoever_has_as_many_tokens_to_come_as_the_longest_starts_at_once():
    prompts, outputs = np.array([700, 900, 50]), np.array([64, 64, 8])
    assert prompt_tokens(NONE, prompts, outputs, 0, 256) == 1600


def test_prompts_are_spread_over_the_steps_that_there_are():
    running, prompts, outputs = np.array([1000]), np.full(50, 1000), np.full(50, 1)
    # Fifty prompts before step 1000: fifty tokens a step, but a step that has room for more is filled.
    assert prompt_tokens(running, prompts, outputs, FULL_STEP, 256) == 50
    assert prompt_tokens(running, prompts, outputs, FULL_STEP - 100, 256) == 100
    assert prompt_tokens(running, prompts, outputs, 1, 256) == FULL_STEP - 1


def test_more_than_run_at_once_take_longer_than_the_longest_of_them():
    prompts, outputs = np.full(8, 100), np.full(8, 50)
    assert prompt_tokens(np.array([50]), prompts, outputs, FULL_STEP, 9) == 800
    # Two at a time need 225 steps for 450 tokens: 800 in the 176 steps until the last must start.
    assert prompt_tokens(np.array([50]), prompts, outputs, FULL_STEP, 2) == 5


@given(
    lengths=st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 300)), min_size=1, max_size=40),
    budget=st.integers(100, 4000),
)
def test_all_end_with_the_longest_if_the_budget_allows(lengths: list[tuple[int, int]], budget: int):
    """Step by step: each starts to decode one step after its prompt is computed."""
    order = sorted(lengths, key=lambda pair: -pair[1])
    missing, to_come = np.array([pair[0] for pair in order]), np.array([pair[1] for pair in order])
    steps, late = 0, False
    while to_come.any():
        decoding = (missing == 0) & (to_come > 0)
        waiting = missing > 0
        tokens = prompt_tokens(to_come[decoding], missing[waiting], to_come[waiting], int(decoding.sum()), 1000)
        assert tokens > 0 or not waiting.any()
        late |= tokens > budget
        tokens = min(tokens, budget)
        to_come[decoding] -= 1
        for i in np.flatnonzero(waiting):
            part = min(tokens, int(missing[i]))
            missing[i] -= part
            tokens -= part
            to_come[i] -= missing[i] == 0
        steps += 1
    assert late or steps == max(outputs for _, outputs in lengths)
