"""What each policy lets into a micro-batch."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.arrival_rate import ArrivalRate
from pipeline.budget import EvenDecodes
from pipeline.cost import CostModel
from pipeline.padding import PaddedSizes
from pipeline.policy import Objective, PolicySettings, SchedulerView
from pipeline.roofline import DEVICES, MODELS, StageSpec
from pipeline.schedule import POLICIES, make_policy
from pipeline.shape import TILE, WAVE, BatchShape
from pipeline.uniform import Uniform
from tests.pipeline.filling import fill, view

STAGE = StageSpec(MODELS["llama-70b"], DEVICES["h200"], 20)
MODEL = CostModel(STAGE.seconds)
MARGIN = Uniform.MARGINS[1]


def policy(name, stages=4, token_budget=1024, slo_s=None, **settings):
    return make_policy(
        name,
        PolicySettings(stages, token_budget, [MODEL] * stages, None if slo_s is None else Objective(slo_s), **settings),
    )


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no schedule 'greedy'"):
        make_policy("greedy", PolicySettings(1, 512))
    with pytest.raises(ValueError, match="cost models"):
        make_policy("uniform", PolicySettings(4, 512))


@given(
    st.integers(1, 600),
    st.lists(st.integers(1, 5000), max_size=100),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), max_size=5),
)
def test_one_stage_and_fixed_chunks_is_the_schedule_without_a_pipeline(token_budget, decodes, prompts):
    """Every decode, then each sequence as much as it lacks, has pages for and the budget leaves."""
    one = policy("fixed_chunk", stages=1, token_budget=token_budget)
    assert one.chunks_follow and one.most_in_flight == 2 and one.ask_again_s(view(decodes), False) == math.inf
    budget = one.begin(view(decodes, [missing for missing, _ in prompts], in_flight=[BatchShape()]))
    left = token_budget
    assert budget.take_decodes(np.array(decodes, dtype=np.int64)) == min(len(decodes), left)
    left -= min(len(decodes), left)
    for missing, room in prompts:
        assert budget.chunk(0, missing, room) == min(missing, room, left)
        budget.add(0, min(missing, room, left))
        left -= min(missing, room, left)
    assert budget.tokens_left == left


@pytest.mark.parametrize("name", POLICIES)
def test_no_more_are_in_flight_than_there_is_a_place_for(name):
    chosen = policy(name)
    places = 5 if name in ("uniform", "offline") else 4
    flight = [BatchShape([(0, 100)])] * places
    assert chosen.begin(view([100] * 8, [5000], in_flight=flight[1:])) is not None
    assert chosen.begin(view([100] * 8, [5000], in_flight=flight)) is None


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_taken_out_can_be_put_in_again(name):
    budget = policy(name).begin(view([500] * 4, [300]))
    fill(budget, prompts=[(0, 300)])
    size = budget.shape.tokens
    assert size > 0
    budget.remove(0, size)
    assert budget.shape.tokens == 0 and budget.tokens_left == 1024 and budget.chunk(0, 300, 300) == size


def test_fixed_chunks_fill_a_number_of_tokens():
    sarathi = policy("fixed_chunk")
    assert not sarathi.chunks_follow
    taken, sizes = fill(sarathi.begin(view([50] * 24, [700, 2000])), [50] * 24, [(0, 700), (0, 2000), (0, 10)])
    assert (taken, sizes) == (24, [700, 300, 0])


def test_the_token_after_a_prompt_needs_no_room_for_prompts():
    """Nothing waits, and the last chunk of a prompt is in flight."""
    budget = policy("uniform", stages=1).begin(view([500]))
    assert fill(budget, [500], [(30, 1), (0, 2)]) == (1, [1, 0])


# ------------------------------------------------------------ uniform


def test_whatever_is_in_a_micro_batch_it_takes_the_same_time():
    uniform = policy("uniform", token_budget=8192, slo_s=0.25)
    times = []
    for decodes, start in (([], 0), ([4000] * 30, 0), ([9000] * 60, 4000), ([100] * 200, 12000)):
        budget = uniform.begin(view(decodes, [100_000]))
        taken, sizes = fill(budget, decodes, [(start, 20000), (0, 80000)])
        assert taken == len(decodes) and sizes[0] > TILE
        times.append(MODEL.predict(budget.shape))
    assert max(times) <= uniform.objective_s(5) == pytest.approx(0.25 * MARGIN / 5)
    assert max(times) - min(times) < TILE * 60e-6  # what a tile costs over a deep prefix


def cost_per_token(tokens):
    """Relative to the cheapest size."""
    seconds = {n: MODEL.predict(BatchShape([(0, n)])) / n for n in range(TILE, 8193, TILE)}
    return MODEL.predict(BatchShape([(0, tokens)])) / tokens / min(seconds.values())


@pytest.mark.parametrize("slo_s", [None, 5.0])
def test_a_micro_batch_takes_no_longer_than_pays(slo_s):
    """Without an objective, or with one that leaves seconds: the fewest tokens that are about as cheap as they get,
    with decodes and after a prefix too, unless that takes much longer."""
    uniform = policy("uniform", token_budget=8192, slo_s=slo_s)
    [size] = fill(uniform.begin(view([], [100_000])), prompts=[(0, 50_000)])[1]
    assert size % WAVE == 0 and cost_per_token(size) < 1.025 < cost_per_token(size - WAVE)
    assert fill(uniform.begin(view([4000] * 5, [100_000])), [4000] * 5, [(1000, 50_000)]) == (5, [size - 5])
    taken, [deep] = fill(uniform.begin(view([4000] * 5, [100_000])), [4000] * 5, [(40_000, 50_000)])
    assert taken == 5 and deep < size - TILE


def test_the_token_budget_is_the_most():
    small = policy("uniform", token_budget=512)
    assert fill(small.begin(view([], [100_000])), prompts=[(0, 50_000)])[1] == [512]


@pytest.mark.parametrize("tokens", [512, 768])
def test_an_objective_leaves_halves_of_waves(tokens):
    """It has time for a tile more than 512 tokens, or than 768."""
    time_s = MODEL.predict(BatchShape([(0, tokens + TILE)]))
    assert time_s < MODEL.predict(BatchShape([(0, tokens + 2 * TILE)]))
    uniform = policy("uniform", token_budget=8192, slo_s=time_s * 1.001 * 5 / MARGIN)
    for start in (0, 2000):
        assert fill(uniform.begin(view([], [100_000])), prompts=[(start, 50_000)])[1] == [tokens]


def size_on_one_stage(model):
    """Tokens of a step of a long prompt."""
    uniform = make_policy("uniform", PolicySettings(1, 8192, [model], None))
    [size] = fill(uniform.begin(view([], [100_000])), prompts=[(0, 50_000)])[1]
    return size


def test_the_objective_of_one_stage_is_for_those_that_decode():
    """A prompt that is alone goes at its cheapest size, and alongside a decode all that waits within the objective."""
    model = CostModel(STAGE.seconds)
    model.observe(BatchShape([(0, 8192)]), STAGE.seconds(BatchShape([(0, 8192)])))
    alone = make_policy("uniform", PolicySettings(1, 8192, [model], None))
    short = make_policy("uniform", PolicySettings(1, 8192, [model], Objective(model.predict(BatchShape([(0, 1300)])))))
    most = fill(alone.begin(view([], [50_000])), prompts=[(0, 50_000)])
    assert fill(short.begin(view([], [50_000])), prompts=[(0, 50_000)]) == most
    taken, [size] = fill(short.begin(view([100], [50_000])), [100], [(0, 50_000)])
    assert taken == 1 and WAVE <= size < 1300 < most[1][0]


def test_one_stage_weighs_those_that_wait_against_those_that_decode():
    """Many decodes and little that waits: the prompt goes in pieces that cost them little. The more waits, the larger
    the pieces, and where prompts arrive too fast for small ones, they are large although little waits."""
    model = CostModel(STAGE.seconds)
    model.observe(BatchShape([(0, 8192)]), STAGE.seconds(BatchShape([(0, 8192)])))
    decodes = [500] * 100

    def size(waiting, *, arriving=0.0):
        uniform = make_policy("uniform", PolicySettings(1, 8192, [model], Objective(1.0)))
        uniform._arrivals.tokens_s = arriving
        return sum(fill(uniform.begin(view(decodes, waiting)), decodes, [(0, n) for n in waiting])[1])

    assert size([1000]) < size([1000] * 8)
    assert size([1000]) < size([1000], arriving=0.8 * 4096 / model.predict(BatchShape([(0, 4096)]))) <= 1000


def test_the_rate_of_arrivals_is_known_from_what_waits():
    arrivals, waiting = ArrivalRate(), 0
    for _ in range(400):  # 3,000 tokens a second, of which steps of 0.05 s take 100 and so too few
        arrivals.see(waiting := waiting + 150 - 100, taken=100, seconds=0.05)
    assert arrivals.tokens_s == pytest.approx(3000, rel=0.01)
    for _ in range(400):
        arrivals.see(waiting := waiting - 50, taken=100, seconds=0.05)
    assert arrivals.tokens_s == pytest.approx(1000, rel=0.01)


def test_one_stage_tries_long_steps_until_one_was_observed():
    """Its prompts have as much attention in any number of steps, so the steps are longer than a pipeline's."""
    model = CostModel(STAGE.seconds)
    tried = size_on_one_stage(model)
    model.observe(BatchShape([(0, 5120)]), STAGE.seconds(BatchShape([(0, 5120)])))
    [of_pipeline] = fill(policy("uniform", token_budget=8192).begin(view([], [100_000])), prompts=[(0, 50_000)])[1]
    assert of_pipeline < size_on_one_stage(model) < tried


def test_one_stage_finds_out_that_long_steps_are_cheap():
    """Whatever was said before, and where nothing but sizes that are tried can tell."""
    said = StageSpec(MODELS["llama-70b"], DEVICES["h200"], 80, ranks=4)
    model = CostModel(said.seconds)
    uniform = make_policy("uniform", PolicySettings(1, 8192, [model], None))
    for _ in range(20 * Uniform.REFRESH_EVERY_STEPS):
        budget = uniform.begin(view([], [100_000]))
        [size] = fill(budget, prompts=[(0, 50_000)])[1]
        model.observe(budget.shape, 0.012 + 63e-6 * size)
    assert size in (4096, 8192), "a token costs 2% more in the smaller"


def test_little_is_spread_over_the_stages_but_not_thinner_than_pays():
    uniform = policy("uniform", token_budget=8192, slo_s=0.5)
    [much] = fill(uniform.begin(view([], [100_000])), prompts=[(0, 100_000)])[1]
    [some] = fill(uniform.begin(view([], [2000])), prompts=[(0, 2000)])[1]
    [little] = fill(uniform.begin(view([], [900])), prompts=[(0, 900)])[1]
    assert little < some < much and cost_per_token(little) < 1.5, "a stage does more than read its weights"


def test_decodes_that_alone_take_too_long_do_not_stop_prompts():
    uniform = policy("uniform", token_budget=8192, slo_s=0.06)
    decodes = [20_000] * 100
    taken, sizes = fill(uniform.begin(view(decodes, [5000])), decodes, [(0, 5000), (0, 5000)])
    assert (taken, sizes) == (100, [TILE, 0])


def test_decodes_without_prompts_are_shared_out_evenly():
    uniform = policy("uniform")
    left = [500] * 30
    flight = []
    while left:
        flying = sum(shape.decodes for shape in flight)
        context = sum(shape.decode_context for shape in flight)
        budget = uniform.begin(SchedulerView(decoding=30, decoding_context=sum(left) + context, in_flight=flight))
        taken, _ = fill(budget, left)
        assert taken and len(left) == 30 - flying
        left = left[taken:]
        flight.append(budget.shape)
    assert [shape.decodes for shape in flight] == [8, 8, 7, 7]


def test_long_contexts_count_for_more():
    uniform = policy("uniform")
    decodes = [40_000] * 4 + [100] * 60
    budget = uniform.begin(view(decodes))
    first, _ = fill(budget, decodes)
    assert first == 1  # the four long ones are most of the work
    everything = sum(decodes)
    rest = decodes[first:]
    budget = uniform.begin(SchedulerView(decoding=64, decoding_context=everything, in_flight=[budget.shape]))
    assert fill(budget, rest)[0] < 16


def test_one_more_is_in_flight_only_where_the_ways_cost_more_than_the_weights():
    decodes = [500] * 32
    flight = [BatchShape([(500, 1)] * 6)] * 4
    flying = SchedulerView(decoding=32, decoding_context=sum(decodes), in_flight=flight)
    assert policy("uniform", exposed_s=0.001).begin(flying) is None
    assert policy("uniform", exposed_s=0.05).begin(flying) is not None


def test_nothing_is_sent_before_the_first_stage_needs_it():
    uniform = policy("uniform")
    busy = view([500] * 8, [5000], ahead_s=0.030)
    assert uniform.begin(busy) is None
    assert uniform.ask_again_s(busy, False) == pytest.approx(0.030 - uniform.LEAD_S)
    assert uniform.begin(view([500] * 8, [5000], ahead_s=0.001)) is not None
    # It became due since it was asked.
    assert uniform.ask_again_s(view([500] * 8, [5000], ahead_s=0.001), False) == 0


def test_it_is_asked_again_when_tokens_are_about_to_come_back():
    uniform = policy("uniform")
    flight = [BatchShape([(500, 1)] * 6)] * 4
    full = SchedulerView(decoding=24, decoding_context=12_000, in_flight=flight, ahead_s=0.001, returning_s=0.010)
    assert uniform.begin(full) is None
    assert uniform.ask_again_s(full, False) == pytest.approx(0.010 - uniform.LEAD_S)
    idle = SchedulerView(decoding=6, decoding_context=3000, in_flight=flight[:1], returning_s=0.010)
    assert uniform.ask_again_s(idle, True) == pytest.approx(0.010 - uniform.LEAD_S)
    # Where prompts wait for a place, tokens on their way make none.
    more = SchedulerView(
        decoding=24, decoding_context=12_000, waiting_tokens=900, in_flight=flight * 2, returning_s=0.010
    )
    assert uniform.ask_again_s(more, False) == math.inf


def test_as_many_are_in_flight_as_each_may_hold_a_wave():
    """A wave takes a stage some 30 ms here. Three may be in flight where a third of the objective is as long, two where
    only a half is; where that is not enough either, the stages need not wait for each other beside it."""

    def after_a_while(slo_s, token_budget=8192):
        uniform = policy("uniform", stages=2, token_budget=token_budget, slo_s=slo_s, exposed_s=0.001)
        loaded = view([4000] * 8, [100_000])
        for _ in range(Uniform.REFRESH_EVERY_STEPS):
            budget = uniform.begin(loaded)
        back = view([4000] * 8, [100_000], in_flight=[budget.shape] * 2, ahead_s=0.001, returning_s=0.002)
        return uniform, budget, back

    for slo_s, is_third in ((None, True), (0.2, True), (0.085, False), (0.05, True)):
        uniform, _, back = after_a_while(slo_s)
        assert (uniform.begin(back) is not None) == is_third, slo_s
        # The place of the oldest is the next one's as soon as that one's tokens are about to be there.
        assert uniform.may_overlap_oldest(back) != is_third
        assert uniform.ask_again_s(view([4000] * 8, [5000], ahead_s=0.001, returning_s=0.02), False) == 0
    uniform, _, back = after_a_while(0.085, token_budget=256)
    assert uniform.begin(back) is not None, "no step may hold a wave"
    uniform, budget, _ = after_a_while(0.085)
    fill(budget, [4000] * 8, [(2000, 100_000)])
    assert budget.shape.tokens >= WAVE
    assert uniform.objective_s(3) < MODEL.predict(budget.shape) < uniform.objective_s(2)
    assert uniform.objective_s(2) == pytest.approx((0.085 * MARGIN - 0.001) / 2)


def test_late_tokens_shorten_the_time_until_one_in_a_hundred_is_late():
    uniform = policy("uniform", token_budget=8192, slo_s=0.2)
    rng = np.random.default_rng(0)
    late = 0
    for i in range(40_000):
        gap_s = 5.6 * uniform.objective_s(5) * rng.lognormal(0, 0.02)  # rounds take longer than they should
        uniform.finished(gap_s)
        late += gap_s > 0.2 and i >= 10_000
    assert 0.005 < late / 30_000 < 0.02


@pytest.mark.parametrize("waiting", [[100_000], []], ids=["while much waits", "while nothing waits"])
def test_rounds_shrink_while_requests_wait_for_pages_and_grow_again(waiting):
    uniform = policy("uniform", token_budget=8192, slo_s=0.25)

    def size():
        return fill(uniform.begin(view([500] * 64, [100_000])), [500] * 64, [(0, 50_000)])[1][0]

    full = size()
    for _ in range(40):
        uniform.begin(view([500] * 64, [2000], blocked_tokens=50_000))
    small = size()
    assert small < 0.6 * full
    for _ in range(400):
        uniform.begin(view([500] * 64, waiting))
    assert size() == full


def test_one_stage_keeps_its_steps_within_the_objective():
    uniform = policy("uniform", stages=1, token_budget=8192, slo_s=0.05)
    budget = uniform.begin(view([500] * 8, [50_000], in_flight=[BatchShape()], ahead_s=1.0))
    fill(budget, [500] * 8, [(0, 5000)])
    assert 0.035 < MODEL.predict(budget.shape) <= 0.05 * MARGIN
    assert fill(uniform.begin(view([500] * 8, in_flight=[budget.shape])), [500] * 8) == (8, [])


def test_an_objective_may_be_iterations_of_decoding_where_these_take_longer():
    iteration_s = 4 * MODEL.predict(BatchShape.decoding(32, 32 * 4096))
    for tbt_s, expected_s in ((10.0, 10.0), (0.001, 5 * iteration_s)):
        uniform = make_policy("uniform", PolicySettings(4, 8192, [MODEL] * 4, Objective(tbt_s, 5)))
        assert uniform.objective_s(5) == pytest.approx(expected_s * MARGIN / 5)


GRAPHS = CostModel(STAGE.seconds, rows=PaddedSizes.of_graphs(256, 8192))


def even(contexts, others, models=(GRAPHS,), places=1):
    """How many of those with these contexts go, where the others, by context too, are in flight."""
    in_flight = len(others) + places
    together = [*contexts, *(context for flying in others for context in flying)]
    budget = EvenDecodes(8192, models, len(together), sum(together), in_flight, places)
    return budget.take_decodes(np.array(contexts, dtype=np.int64))


def test_decodes_leave_no_graph_for_a_larger_one():
    """That 61 have somewhat longer contexts does not make 67 of the others worth the graph for 80; it would, if most
    of the time went into contexts."""
    assert even([700] * 67, [[800] * 61]) == 64
    assert even([800] * 61, [[700] * 67]) == 61
    assert even([800] * 64, [[700] * 64]) == 64
    assert even([7000] * 67, [[8000] * 61]) == 67
    # More than fit into two graphs for 64: one of 80 is paid for, whoever fills it.
    assert even([300] * 70, [[300] * 60]) == 70


def test_decodes_are_left_behind_only_where_that_pays():
    assert even([500] * 9, [[500] * 7] * 3, [MODEL]) == 9
    assert even([500] * 200, [[500] * 8] * 3, [MODEL]) < 70
    assert even([40_000] * 4 + [100] * 12, [[100] * 16] * 3, [MODEL]) == 1
    assert even([100] * 12 + [40_000] * 4, [[100] * 16] * 3, [MODEL]) == 13
    assert even([500] * 2, [[50_000] * 20], [MODEL]) == 2


def test_the_costliest_stage_decides_how_many_decodes_go():
    """One for which the contexts are all that counts, beside one for which they cost next to nothing."""
    reads = CostModel(lambda shape: 1e-3 + 1e-6 * shape.decode_context)
    slow = CostModel(lambda shape: 1.0 + 1e-9 * shape.decode_context)
    contexts, others = [4000] * 40, [[100] * 40]
    assert even(contexts, others, [reads]) < 25
    assert even(contexts, others, [reads, slow]) == 40


@given(
    st.lists(st.integers(0, 50_000), min_size=1, max_size=60),
    st.lists(st.lists(st.integers(0, 50_000), max_size=60), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from([MODEL, GRAPHS]),
)
def test_as_many_decodes_go_as_cost_what_the_others_do(contexts, others, places, model):
    """Or all that have come back, or as many as a graph holds."""
    taken = even(contexts, others, [model], places)
    most = -(-len(contexts) // places)
    together = [*contexts, *(context for flying in others for context in flying)]

    def own_s(count):
        return model.predict(BatchShape([(context, 1) for context in contexts[:count]]))

    def other_s(count):
        rest, other = len(together) - count, BatchShape()
        other.tokens = other.decodes = -(-rest // (len(others) + places - 1))
        other.decode_context = (sum(together) - sum(contexts[:count]) + rest) * other.decodes // max(1, rest)
        return model.predict(other)

    assert 1 <= taken <= most
    if taken == most:
        return
    worth = 1 + EvenDecodes.MIN_GAIN
    assert max(own_s(taken), other_s(taken)) * worth < own_s(most)
    if own_s(taken) < other_s(taken):
        assert own_s(taken + 1) > other_s(taken) * worth


@given(st.integers(6, 200), st.integers(0, 20_000), st.integers(2, 5), st.sampled_from([MODEL, GRAPHS]))
@example(6, 4000, 4, GRAPHS)
def test_soon_every_decode_goes_in_every_round(decoding, context, in_flight, model):
    """At first one is in each micro-batch, and all others are ready for the last of these."""
    flight, ready = [[i] for i in range(in_flight - 1)], list(range(in_flight - 1, decoding))
    gone = [0] * decoding
    for turn in range(8 * in_flight):
        taken = even([context] * len(ready), [[context] * len(batch) for batch in flight], [model])
        for i in ready[:taken]:
            gone[i] = turn
        assert turn - min(gone) < in_flight or turn < 4 * in_flight
        flight.append(ready[:taken])
        ready = ready[taken:] + flight.pop(0)
