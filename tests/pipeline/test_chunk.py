"""The size of a chunk."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.chunk import chunk_tokens, tokens_within
from pipeline.cost import Coefficients, CostModel
from pipeline.padding import UNPADDED, PaddedSizes
from pipeline.roofline import DEVICES, MODELS, StageSpec
from pipeline.shape import FEATURES, TILE, TILED_FROM, BatchShape

STAGE = StageSpec(MODELS["llama-70b"], DEVICES["h200"], 20)
MOST = 1 << 20


def model_of(factors, rows):
    """A stage's model whose coefficients are those of an H200, each by a factor of its own."""
    model = CostModel(STAGE.seconds, rows=rows)
    model.coefficients = Coefficients(np.array(model.coefficients.values) * factors, rows)
    return model


models = st.builds(
    model_of,
    st.lists(st.sampled_from([0.0, 0.3, 1.0, 4.0]), min_size=len(FEATURES), max_size=len(FEATURES)),
    st.sampled_from([UNPADDED, PaddedSizes.of_graphs(256, 8192)]),
)
batches = st.builds(
    lambda decodes, context, chunks: BatchShape([*[(context, 1)] * decodes, *chunks]),
    st.integers(0, 400),
    st.integers(0, 9000),
    st.lists(st.tuples(st.integers(0, 9000), st.integers(2, 700)), max_size=2),
)
starts = st.integers(0, 16000)
targets = st.floats(0.001, 0.3)


def with_chunk(model, batch, start, length):
    batch.add(start, length)
    seconds = model.predict(batch)
    batch.remove(start, length)
    return seconds


@pytest.mark.parametrize(
    ("missing", "budget", "room", "size"),
    [
        (1, 512, 16, 1),  # a decode
        (1000, 512, 2000, 512),  # a long prompt takes what the step has left
        (1000, 512, 40, 40),  # or what there are pages for
        (10, 512, 2000, 10),
        (10, 0, 2000, 0),
        (10, -3, 2000, 0),
        (10, 512, 0, 0),
    ],
)
def test_sizes(missing, budget, room, size):
    assert chunk_tokens(missing, budget, room) == size


def test_a_complete_sequence_is_refused():
    with pytest.raises(ValueError, match="nothing missing"):
        chunk_tokens(0, 1, 1)


@given(models, batches, starts, targets)
@pytest.mark.slow
def test_it_is_the_largest_that_fits(model, batch, start, target_s):
    size = tokens_within([model], batch, start, target_s, MOST)
    if size:
        assert with_chunk(model, batch, start, size) <= target_s * (1 + 1e-9)
    if size < MOST:
        total = batch.tokens + size
        # One token more, or one tile where tiles are whole. (A chunk of one token is costed as a decode.)
        more = size + 1 if total < TILED_FROM else (total // TILE + 1) * TILE - batch.tokens
        assert more < 2 or with_chunk(model, batch, start, more) >= target_s * (1 - 1e-6)


@given(models, batches, starts, targets, st.floats(1.0, 2.0), st.integers(0, 4000), st.integers(0, 9000))
@pytest.mark.slow
def test_it_shrinks_with_the_time_the_prefix_and_the_batch(model, batch, start, target_s, longer, further, context):
    size = tokens_within([model], batch, start, target_s, MOST)
    assert tokens_within([model], batch, start, target_s * longer, MOST) >= size
    assert tokens_within([model], batch, start + further, target_s, MOST) <= size
    batch.add(context, 1)
    fuller = tokens_within([model], batch, start, target_s, MOST)
    assert fuller < size + TILE
    # The decode is one of the rows: the chunk is shorter by a token for as many. Where that token costs more than the
    # decode, another tile may just fit.
    cost = model.coefficients
    token_s = cost.prefix_product * start + cost.square * (2 * fuller + 1)
    assert fuller <= size or cost.decode + cost.decode_context * (context + 1) < token_s * (1 + 1e-6)


@given(models, models, batches, starts, targets, st.integers(0, 2000))
@pytest.mark.slow
def test_the_slowest_stage_decides(one, other, batch, start, target_s, most):
    sizes = [tokens_within([model], batch, start, target_s, most) for model in (one, other)]
    assert tokens_within([one, other], batch, start, target_s, most) <= min(sizes)
    assert tokens_within([one, other], batch, start, math.inf, most) == most


@given(batches, starts, targets)
def test_large_batches_fill_their_tiles(batch, start, target_s):
    size = tokens_within([CostModel(STAGE.seconds)], batch, start, target_s, MOST)
    total = batch.tokens + size
    assert not size or total <= TILED_FROM or total % TILE == 0 or total // TILE == batch.tokens // TILE


def test_a_graph_that_is_paid_for_is_filled():
    """Beside 20 decodes a chunk goes up to the size of a graph, and further only where a deep prefix leaves no time for
    the whole of the next one."""
    rows = PaddedSizes.of_graphs(256, 8192)
    model = CostModel(STAGE.seconds, rows=rows)
    batch = BatchShape([(1000, 1)] * 20)
    enough = with_chunk(model, batch, 500, 44)
    assert model.rows.mixed(20 + 43) == 64 and with_chunk(model, batch, 500, 30) < enough
    assert tokens_within([model], batch, 500, enough * 1.0001, MOST) == 44
    assert tokens_within([model], batch, 500, enough * 0.9999, MOST) in range(40, 44)
    just = with_chunk(model, batch, 200_000, 50)
    assert tokens_within([model], batch, 200_000, just * 1.00001, MOST) == 50


def test_a_last_token_is_costed_as_a_decode():
    model = CostModel(STAGE.seconds)
    batch = BatchShape([(100, 1)] * 8)
    enough = with_chunk(model, batch, 500, 1)
    assert tokens_within([model], batch, 500, enough * 1.0001, 1) == 1
    assert tokens_within([model], batch, 500, enough * 0.9999, 1) == 0


def test_deep_prefixes_get_smaller_chunks_of_the_same_time():
    model = CostModel(STAGE.seconds)
    batch = BatchShape([(4000, 1)] * 16)
    sizes = {start: tokens_within([model], batch, start, 0.05, MOST) for start in (0, 8000, 16000)}
    assert sizes[0] > sizes[8000] > sizes[16000] > 0
    # All take the time: what is lost is less than a tile.
    for start, size in sizes.items():
        assert 0.05 - 128 * 60e-6 < with_chunk(model, batch, start, size) <= 0.05
