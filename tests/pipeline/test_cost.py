"""The cost model against synthetic devices: it starts right, learns, and cannot be led astray."""

import itertools
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cost import Coefficients, CostModel
from pipeline.padding import PaddedSizes
from pipeline.roofline import DEVICES, MODELS, StageSpec
from pipeline.shape import FEATURES, BatchShape, features, typical_shapes

STAGE = StageSpec(MODELS["llama-70b"], DEVICES["h200"], 20)


def hardware(shape, slow=1.0):
    """A device that the features do not describe exactly: 132 units that compute tiles of 128 x 256 in whole waves,
    attention in blocks, prefixes read twice."""
    n = max(shape.tokens, 1)
    rows = math.ceil(n / 128) if n > 64 else 0.5
    arithmetic = 0.0
    for width, depth in ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)):
        waves = max(1.0, math.ceil(rows * width / 256) / 132)
        waves = 0.5 * waves + 0.5 * math.ceil(waves)  # the next product begins where a wave leaves room
        arithmetic += waves * 2 * 128 * 256 * depth / (800e12 / 132)
    memory = 855e6 * 2 / 3.9e12
    products = (arithmetic**3 + memory**3) ** (1 / 3)
    attention = shape.decode_context * 4096 / 3.6e12 + shape.decodes * 0.3e-6
    attention += 4 * 8192 * (shape.prefix_products + 0.6 * shape.squares) / 500e12 + 2 * shape.prefixes * 4096 / 4e12
    return slow * (20 * (products + attention + 8e-6) + 3e-4 * (shape.chunks > 0) + n * 2.5e-6)


def batch(rng):
    """What a replica meets: decodes alone, decodes beside chunks, chunks alone."""
    shape = BatchShape()
    kind = rng.random()
    if kind < 0.8:
        context = rng.integers(100, 8000)
        for _ in range(rng.integers(1, 100)):
            shape.add(int(rng.integers(50, 2 * context)), 1)
    if kind > 0.4:
        for _ in range(rng.integers(1, 4)):
            shape.add(int(rng.choice([0, rng.integers(0, 12000)])), int(rng.integers(2, 1000)))
    return shape


def median_error(model, rng, slow=1.0):
    shapes = [batch(rng) for _ in range(300)]
    return np.median([abs(model.predict(shape) / hardware(shape, slow) - 1) for shape in shapes])


def teach(model, rng, steps, slow=1.0, noise=0.02, outliers=0.03):
    for _ in range(steps):
        shape = batch(rng)
        seconds = hardware(shape, slow) * rng.lognormal(0, noise)
        model.observe(shape, seconds * 10 if rng.random() < outliers else seconds)


def test_the_prior_predicts_the_first_step():
    model = CostModel(STAGE.seconds)
    errors = [abs(model.predict(shape) / STAGE.seconds(shape) - 1) for shape in typical_shapes()]
    assert np.median(errors) < 0.02 and max(errors) < 0.25


def test_it_learns_a_device_beside_noise_and_outliers():
    rng = np.random.default_rng(0)
    model = CostModel(STAGE.seconds)
    teach(model, rng, 600)
    assert median_error(model, rng) < 0.03
    assert model.error() < 0.05


def test_a_few_measurements_are_enough_for_a_device_half_as_fast_as_its_roofline():
    rng = np.random.default_rng(1)
    model = CostModel(STAGE.seconds)
    assert median_error(model, rng, slow=2.0) > 0.3
    teach(model, rng, 16, slow=2.0)
    assert median_error(model, rng, slow=2.0) < 0.08


def test_it_follows_a_device_that_slows_down():
    rng = np.random.default_rng(2)
    model = CostModel(STAGE.seconds)
    teach(model, rng, 1000)
    for slow in np.linspace(1.0, 1.3, 10):
        teach(model, rng, 100, slow)
    teach(model, rng, 600, slow=1.3)
    assert median_error(model, rng, slow=1.3) < 0.05


def test_a_kind_of_step_that_never_came_is_learned_at_once() -> None:
    """Prompts for long, then decodes for the first time, on a device whose roofline knows neither."""
    rng = np.random.default_rng(5)
    model = CostModel(STAGE.seconds)
    for _ in range(1000):  # the last fit is a while ago, the next is far
        shape = BatchShape([(int(rng.integers(4000)), int(rng.integers(200, 1000)))])
        model.observe(shape, 1.5 * hardware(shape) * rng.lognormal(0, 0.01))
    decodes = [BatchShape([(int(context), 1)] * 12) for context in rng.integers(6000, 8000, 60)]
    assert abs(model.predict(decodes[0]) / hardware(decodes[0]) - 1) > 0.1
    for shape in decodes[:50]:
        model.observe(shape, hardware(shape))
    assert all(abs(model.predict(shape) / hardware(shape) - 1) < 0.05 for shape in decodes[50:])


def test_one_token_alone_is_a_kind_of_its_own() -> None:
    """A device that computes one in 17 ms, and two in 18 (measured: a stage of 40 layers of Llama-70B)."""
    model = CostModel(STAGE.seconds)
    for _ in range(100):
        for tokens, seconds in ((1, 0.0172), (2, 0.0182), (3, 0.0185), (12, 0.0213)):
            model.observe(BatchShape([(7000, 1)] * tokens), seconds)
    alone, two = BatchShape([(7000, 1)]), BatchShape([(7000, 1)] * 2)
    assert model.predict(alone) == pytest.approx(0.0172, rel=0.01)
    assert model.predict(two) == pytest.approx(0.0182, rel=0.01)


def test_a_device_that_has_become_slower_is_learned():
    """Its clock falls with its heat."""
    rng = np.random.default_rng(4)
    model = CostModel(STAGE.seconds)
    teach(model, rng, 1030)
    prompt = BatchShape([(2000, 700)])
    cool_s = model.predict(prompt)
    for tokens in (512, 640, 768, 1024) * 50:
        shape = BatchShape([(1000, tokens)])
        model.observe(shape, 1.15 * STAGE.seconds(shape))
    assert model.predict(prompt) == pytest.approx(1.15 * cool_s, rel=0.05)


def test_what_never_came_is_predicted_by_the_scaled_prior():
    rng = np.random.default_rng(3)
    model = CostModel(STAGE.seconds)
    for _ in range(300):
        shape = BatchShape([(int(rng.integers(100, 4000)), 1)] * int(rng.integers(1, 64)))
        model.observe(shape, 1.5 * STAGE.seconds(shape))
    unseen = BatchShape([(4000, 1000)])
    assert model.predict(unseen) == pytest.approx(1.5 * STAGE.seconds(unseen), rel=0.1)


def test_nonsense_leaves_the_prior_in_charge():
    """Times that have nothing to do with the batches: whatever is fitted, the prior did better."""
    rng = np.random.default_rng(4)
    model = CostModel(STAGE.seconds)
    shapes = [batch(rng) for _ in range(400)]
    times = [STAGE.seconds(shape) for shape in shapes]
    for shape, seconds in zip(shapes, times, strict=True):
        model.observe(shape, seconds if rng.random() < 0.7 else rng.choice(times))
    errors = [abs(model.predict(shape) / STAGE.seconds(shape) - 1) for shape in shapes]
    assert np.median(errors) < 0.05


@given(st.lists(st.tuples(st.integers(0, 20000), st.integers(1, 3000)), min_size=1, max_size=20), st.data())
def test_sums_are_kept_as_chunks_come_and_go(chunks, data):
    shape = BatchShape(chunks)
    extra = data.draw(st.tuples(st.integers(0, 20000), st.integers(1, 3000)))
    before = features(shape, shape.tokens)
    shape.add(*extra)
    again = BatchShape([*chunks, extra])
    assert features(shape, shape.tokens) == features(again, again.tokens)
    shape.remove(*extra)
    assert features(shape, shape.tokens) == before == features(shape.copy(), shape.tokens)


@given(
    st.lists(st.floats(0, 1e-3), min_size=len(FEATURES), max_size=len(FEATURES)),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 1500)), min_size=1, max_size=8),
)
def test_predicting_is_the_product_with_the_features(values, chunks):
    shape = BatchShape(chunks)
    cost = Coefficients(values)
    unused = FEATURES.index("unused_rows")
    values[unused] = min(
        values[unused],
        sum(
            v
            for v, f in zip(values, FEATURES, strict=True)
            if f in ("rows_above_0", "rows_above_64", "rows_above_128", "rows_above_256")
        ),
    )
    assert cost.predict(shape) == pytest.approx(
        float(np.dot(values, features(shape, shape.tokens))), rel=1e-9, abs=1e-12
    )


def test_a_token_more_never_makes_a_batch_cheaper():
    rng = np.random.default_rng(5)
    model = CostModel(STAGE.seconds)
    teach(model, rng, 300)
    for start in (0, 5000):
        costs = [model.predict(BatchShape([(100, 1), (start, length)])) for length in range(2, 1500)]
        assert all(b >= a - 1e-12 for a, b in itertools.pairwise(costs))


def test_steps_that_are_padded_to_the_same_graph_cost_the_same(tmp_path):
    """Up to what the sequences themselves cost; and one row less than the smallest of them saves all of the padding."""
    rows = PaddedSizes.of_graphs(256, 8192)

    def padded(shape):
        return 0.01 + 1e-4 * rows.padded(shape)

    def decodes(count):
        return BatchShape([(500, 1)] * count)

    model = CostModel(lambda shape: 0.02 + 5e-5 * rows.padded(shape), {"model": "tiny"}, rows=rows)
    rng = np.random.default_rng(7)
    for _ in range(300):
        shape = decodes(int(rng.integers(1, 200)))
        model.observe(shape, padded(shape))
        shape = BatchShape([(0, int(rng.integers(2, 600)))])
        model.observe(shape, padded(shape))
    model.save(tmp_path / "cost.json")
    again = CostModel(lambda shape: 0.03, {"model": "tiny"}, rows=rows)
    again.load(tmp_path / "cost.json")
    for learned in (model, again):
        assert learned.predict(decodes(65)) == pytest.approx(learned.predict(decodes(80)), rel=1e-3)
        assert learned.predict(decodes(65)) - learned.predict(decodes(64)) == pytest.approx(16e-4, rel=0.1)
        assert learned.predict(BatchShape([(0, 150)])) == pytest.approx(padded(BatchShape([(0, 160)])), rel=0.02)


def test_what_was_learned_is_saved_and_read_again(tmp_path):
    rng = np.random.default_rng(6)
    identity = {"model": "llama-70b", "layers": [0, 20], "device": "h200", "ranks": 1}
    model = CostModel(STAGE.seconds, identity)
    teach(model, rng, 200, slow=1.7)
    model.save(tmp_path / "cost.json")
    again = CostModel(STAGE.seconds, identity)
    again.load(tmp_path / "cost.json")
    assert again.most_rows == model.most_rows > 0
    for _ in range(20):
        shape = batch(rng)
        assert again.predict(shape) == pytest.approx(model.predict(shape))
    teach(again, rng, 200, slow=1.7)
    assert median_error(again, rng, slow=1.7) < 0.04
    other = CostModel(STAGE.seconds, {**identity, "device": "a100"})
    with pytest.raises(ValueError, match="was measured on"):
        other.load(tmp_path / "cost.json")
    for name, value in (
        ("coefficients", [math.nan] * len(FEATURES)),
        ("num_observed", math.inf),
        ("window", [[1, -0.5, [1.0] * len(FEATURES)]]),
        ("window", [[1, 0.5, [0.0] * len(FEATURES)]]),
        ("window", [[1, 0.5, [math.nan] * len(FEATURES)]]),
    ):
        (tmp_path / "odd.json").write_text(json.dumps(json.loads((tmp_path / "cost.json").read_text()) | {name: value}))
        before = again.num_observed
        with pytest.raises(ValueError, match=r"it (has|is)"):
            again.load(tmp_path / "odd.json")
        assert again.num_observed == before
    (tmp_path / "old.json").write_text('{"version": 0}')
    with pytest.raises(ValueError, match="another version"):
        again.load(tmp_path / "old.json")


def test_nothing_is_learned_from_an_empty_batch_or_no_time():
    model = CostModel(STAGE.seconds)
    model.observe(BatchShape(), 1.0)
    model.observe(BatchShape([(0, 10)]), 0.0)
    assert model.num_observed == 0 and math.isnan(model.error())


def test_a_fit_that_gives_a_step_no_time_is_survived():
    """Noise can make it: nothing of such a step is arithmetic, and there is no clock to be read of it."""
    model = CostModel(STAGE.seconds)
    nothing = Coefficients([0.0] * len(FEATURES))
    model._learned = model.coefficients = nothing
    model.observe(BatchShape.decoding(3, 30), 0.02)
    assert model.num_observed == 1 and model.coefficients is nothing


def test_predicting_takes_microseconds():
    model = CostModel(STAGE.seconds)
    shape = BatchShape([*[(1000, 1)] * 30, (4000, 500)])
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(1000):
            model.predict(shape)
        best = min(best, (time.perf_counter() - begin) / 1000)
    assert best < 10e-6
