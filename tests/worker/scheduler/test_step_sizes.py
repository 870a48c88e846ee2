"""Counts of steps by their tokens."""

from worker.messages import MAX_COUNTED_STEP_TOKENS, ReplicaLoad
from worker.scheduler.step_sizes import NUM_BOUNDS, StepSizes


def test_steps_are_counted_by_their_tokens() -> None:
    sizes, load = StepSizes(), ReplicaLoad(incarnation="")
    for tokens in (1, 2, 3, 4, 5, MAX_COUNTED_STEP_TOKENS, MAX_COUNTED_STEP_TOKENS + 1, 1 << 30):
        sizes.add(tokens)
    sizes.describe(load)
    bounds = [1 << bits for bits in range(NUM_BOUNDS)]
    assert bounds[-1] == MAX_COUNTED_STEP_TOKENS and len(load.step_tokens) == NUM_BOUNDS + 1
    assert load.step_tokens[:4] == [1, 1, 2, 1] and load.step_tokens[-2:] == [1, 2]
    assert sum(load.step_tokens) == 8
    before = list(load.step_tokens)
    sizes.add(1)
    assert load.step_tokens == before  # a load that was told does not change
