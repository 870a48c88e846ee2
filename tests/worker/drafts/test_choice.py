"""How many drafts a step takes, by predicted times."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from pipeline.padding import PaddedSizes
from pipeline.shape import BatchShape
from worker.drafts import Drafter, Proposal, SpeculativeDecoding
from worker.drafts.speculative_decoding import COUNTS, MAX_STEPS_OFF, _with_drafts

CONTEXT = 100


class Steady(Drafter):
    """Proposes `most` tokens, up to `length`."""

    name = "steady"

    def __init__(self, length: int) -> None:
        self._length = length

    def add(self, key, prompt_ids, output_ids, prediction_ids, grammar) -> None:
        pass

    def extend(self, key, token_ids) -> None:
        pass

    def propose(self, key: int, most: int) -> Proposal:
        return Proposal(list(range(min(most, self._length))))

    def remove(self, key: int) -> None:
        pass


@dataclass
class Running:
    """A sequence that decodes."""

    slot: int
    num_tokens: int = CONTEXT
    num_known: int = CONTEXT
    token_limit: int = 1000
    num_computed: int = CONTEXT - 1
    tokens: np.ndarray = field(default_factory=lambda: np.arange(1000))

    def token_ids(self, start: int, end: int) -> np.ndarray:
        return self.tokens[start:end]


def chosen(
    batch: int,
    seconds: Callable[[BatchShape], float],
    rows: PaddedSizes,
    length: int = 3,
    room: int = 10_000,
    prompts: list[tuple[int, int]] | None = None,
) -> int:
    """The number of drafts that a step with `batch` decodes and these chunks of prompts takes."""
    speculation = SpeculativeDecoding([Steady(length)], seconds, 32, clock=lambda: 0.0, rows=rows)
    for slot in range(batch):
        speculation.add(slot, [0] * CONTEXT, [], [], None)
    shape = BatchShape([*[(CONTEXT - 1, 1)] * batch, *(prompts or [])])
    sequences = [Running(slot) for slot in range(batch)]
    taken = speculation.choose(sequences, shape, room)
    assert speculation.may_follow(sequences, shape) == bool(taken)
    return sum(map(len, taken.values()))


def nearly_free(shape: BatchShape) -> float:
    """A model that says that rows cost next to nothing."""
    return 10.0 + 0.001 * shape.tokens


def padded(rows: PaddedSizes) -> Callable[[BatchShape], float]:
    """A step's time grows with the size of its graph alone."""
    return lambda shape: 10.0 + 1.0 * rows.padded(shape)


GRAPHS = PaddedSizes.of_graphs(512, 8192)


@pytest.mark.parametrize(
    ("batch", "taken"),
    [
        (1, 3),
        (64, 192),  # 256 rows: the largest graph
        (65, 191),
        (200, 56),
        (255, 1),
        (256, 0),
        (300, 0),  # a graph of decodes alone is larger
        (512, 0),
        (600, 1800),  # no graph without drafts either
    ],
)
def test_no_draft_makes_a_step_too_long_for_a_graph(batch: int, taken: int) -> None:
    assert chosen(batch, nearly_free, GRAPHS) == taken


def test_without_graphs_there_is_no_edge() -> None:
    assert chosen(256, nearly_free, PaddedSizes()) == 768


def test_a_graph_has_no_more_logits_than_slots() -> None:
    assert chosen(32, nearly_free, PaddedSizes.of_graphs(64, 8192)) == 32


def test_prompts_count_for_the_edge() -> None:
    assert chosen(16, nearly_free, GRAPHS, prompts=[(0, 224)]) == 16
    assert chosen(16, nearly_free, GRAPHS, prompts=[(0, 300)]) == 48, "no graph anyway"


def test_drafts_that_fill_the_padding_are_taken_together() -> None:
    """Up to the next size all cost the same, and one more draft costs 16 rows."""
    assert chosen(1, padded(GRAPHS), GRAPHS, length=32) == 15
    assert chosen(41, padded(GRAPHS), GRAPHS, length=1) == 7


def test_no_drafts_where_none_pay() -> None:
    assert chosen(8, lambda shape: float(shape.tokens), PaddedSizes()) == 0


def test_drafts_may_follow_a_step_of_prompts_alone() -> None:
    speculation = SpeculativeDecoding([Steady(3)], nearly_free, 32, clock=lambda: 0.0)
    speculation.add(0, [0] * CONTEXT, [], [], None)
    assert speculation.may_follow([Running(0)], BatchShape([(0, CONTEXT)]))


def test_the_room_of_a_step_is_a_limit() -> None:
    assert chosen(8, nearly_free, PaddedSizes(), room=5) == 5


@pytest.mark.parametrize("decodes", [1, 3, 40])
@pytest.mark.parametrize("count", COUNTS)
def test_the_shape_with_drafts_is_that_of_its_chunks(decodes: int, count: int) -> None:
    chunks = min(count, decodes)
    lengths = [1 + (count + i) // chunks for i in range(chunks)] + [1] * (decodes - chunks)
    one_by_one = BatchShape([*((CONTEXT, length) for length in lengths), (7, 20)])
    together = _with_drafts(BatchShape([*[(CONTEXT, 1)] * decodes, (7, 20)]), count)
    assert all(getattr(together, name) == getattr(one_by_one, name) for name in BatchShape.__slots__)


class Costly(Steady):
    """Takes 20 us for each proposal, on its own clock, and knows something only while `knows`."""

    def __init__(self) -> None:
        super().__init__(3)
        self.knows = False
        self.now_s = 0.0
        self.asked: list[int] = []

    def propose(self, key: int, most: int) -> Proposal:
        self.now_s += 20e-6
        self.asked.append(key)
        return super().propose(key, most) if self.knows else Proposal([])


def test_looks_cost_little_while_no_drafts_pay() -> None:
    """However many sequences run, looks take half a percent of the steps' time, and all sequences have their turn. From
    the step on in which some promise much, all are asked. When that ends, looks in vain are put off."""
    drafter, batch, steps, step_s = Costly(), 200, 2000, 10e-3
    speculation = SpeculativeDecoding([drafter], lambda shape: step_s, 3, clock=lambda: drafter.now_s)
    running = [Running(slot) for slot in range(batch)]
    for seq in running:
        speculation.add(seq.slot, list(range(CONTEXT)), [], [], None)
    shape = BatchShape.decoding(batch, batch * CONTEXT)
    assert not any(speculation.may_follow(running, shape) for _ in range(steps))
    assert drafter.now_s <= 0.0055 * steps * step_s
    assert set(drafter.asked) == set(range(batch))
    drafter.knows = True
    waited = next(i for i in range(10) if speculation.may_follow(running, shape))
    assert waited < 3
    drafter.asked.clear()
    assert len(speculation.choose(running, shape, 1000)) == len(drafter.asked) == batch
    drafter.knows = False
    assert not speculation.may_follow(running, shape)
    drafter.asked.clear()
    for _ in range(steps):
        speculation.may_follow(running, shape)
        if drafter.asked:
            break
    else:
        pytest.fail("looks are put off for ever")
    assert len(drafter.asked) < batch / 10


def test_looks_in_vain_are_put_off_for_longer_and_longer() -> None:
    """Each time a sample promises what the whole does not hold. Steps are short, for looks of 4 ms."""
    drafter, batch, step_s = Costly(), 200, 1e-3
    speculation = SpeculativeDecoding([drafter], lambda shape: step_s, 3, clock=lambda: drafter.now_s)
    running = [Running(slot) for slot in range(batch)]
    for seq in running:
        speculation.add(seq.slot, list(range(CONTEXT)), [], [], None)
    shape = BatchShape.decoding(batch, batch * CONTEXT)
    waits = []
    for _ in range(6):
        drafter.knows = True
        waits.append(next(i for i in range(10_000) if speculation.may_follow(running, shape)))
        drafter.knows = False
        assert not speculation.may_follow(running, shape)
    assert waits[0] < waits[1] < waits[2] < waits[3] < waits[4] <= MAX_STEPS_OFF
