"""The arithmetic of a stage, against figures measured on an H200 and sizes that are public."""

from dataclasses import replace

import pytest

from pipeline.roofline import DEVICES, LINKS, MODELS, StageSpec, make_stages
from pipeline.shape import BatchShape

H200 = DEVICES["h200"]


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-8b", 8.03), ("llama-70b", 70.6), ("llama-405b", 405.9), ("falcon-180b", 179.5)]
)
def test_models_have_the_parameters_that_their_names_say(name, billions):
    model = MODELS[name]
    embeddings = model.head_weights * (1 if name == "falcon-180b" else 2)  # Falcon ties them
    assert (model.layers * model.layer_weights + embeddings) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("tokens", "measured_ms"), [(1, 3.89), (64, 4.14), (256, 5.75), (512, 9.39), (2048, 35.9)])
def test_linear_layers_of_an_8b_model(tokens, measured_ms):
    """What one step spends beyond its attention, activations and launches."""
    model = MODELS["llama-8b"]
    free = StageSpec(model, H200, 32).seconds(BatchShape([(0, tokens)]))
    layer_s = H200.layer_s if tokens == 1 else H200.mixed_layer_s
    activations = tokens * 2 * (16 * model.hidden + 6 * model.inner) / H200.bytes_per_s
    attention = 4 * tokens**2 / 2 * 4096 / H200.attention_flops if tokens > 1 else 0.0
    linear_s = free - 32 * (layer_s + activations + attention)
    assert linear_s * 1e3 == pytest.approx(measured_ms, rel=0.05)


@pytest.mark.parametrize(
    ("chunks", "measured_ms"),
    [([(4095, 1)] * 64, 0.250), ([(0, 8192)], 1.00), ([(8192, 512)], 0.131)],
)
def test_attention_of_a_layer_with_32_heads(chunks, measured_ms):
    shape = BatchShape(chunks)
    stage = StageSpec(MODELS["llama-8b"], H200, 1)
    bare = shape.copy()
    bare.decode_context = bare.prefix_products = bare.squares = bare.prefixes = 0
    assert (stage.seconds(shape) - stage.seconds(bare)) * 1e3 == pytest.approx(measured_ms, rel=0.15)


def test_a_model_with_experts_has_the_parameters_that_its_name_says():
    model = MODELS["qwen3-30b-a3b"]
    assert (model.all_weights + 2 * model.head_weights) / 1e9 == pytest.approx(30.5, rel=0.01)
    used = model.layers * model.sparse_weights(model.chosen) + 2 * model.head_weights
    assert used / 1e9 == pytest.approx(3.3, rel=0.02)


def test_a_model_with_latent_attention_has_the_parameters_that_its_name_says():
    model = MODELS["deepseek-v2-lite"]
    assert model.all_weights + 2 * model.head_weights == pytest.approx(15.7e9, rel=0.01)
    assert model.layers * model.kv_bytes == 27 * 576 * 2


def test_a_step_reads_the_experts_that_its_tokens_use():
    """One sequence reads some 6 GB, and 256 read all 61 GB. A long prompt is bound by the arithmetic of 8 experts."""
    model = MODELS["qwen3-30b-a3b"]
    (stage,) = make_stages(model, H200, 1)
    assert {layer.experts for layer in model.layer_specs} == {128}
    one, many = (stage.seconds(BatchShape([(0, 1)] * n)) for n in (1, 256))
    small_s = 48 * H200.layer_s
    assert (one - small_s) * H200.bytes_per_s / 1e9 == pytest.approx(6.1, rel=0.05)
    assert (many - small_s) * H200.bytes_per_s / 1e9 == pytest.approx(62, rel=0.08)
    prompt = stage.seconds(BatchShape([(0, 8192)]))
    arithmetic = 2 * 8192 * model.layers * model.sparse_weights(8) / H200.flops
    assert arithmetic < prompt < 2.5 * arithmetic


def test_layers_without_experts_come_first_and_cost_what_they_cost():
    model = replace(MODELS["qwen3-30b-a3b"], dense_layers=3)
    stages = make_stages(model, H200, 4)
    assert [stage.layers for stage in stages] != [12, 12, 12, 12]
    assert [layer.experts > 0 for layer in model.layer_specs] == [False] * 3 + [True] * 45
    assert [stage.first for stage in stages] == [sum(each.layers for each in stages[:n]) for n in range(4)]
    whole = StageSpec(model, H200, 48, True)
    assert whole.kv_tokens() > make_stages(MODELS["qwen3-30b-a3b"], H200, 1)[0].kv_tokens()


def test_ranks_share_the_work_and_pay_for_sums():
    shape = BatchShape([(1000, 1000)])
    alone = StageSpec(MODELS["llama-70b"], H200, 20).seconds(shape)
    free = StageSpec(MODELS["llama-70b"], H200, 20, ranks=4).seconds(shape)
    joined = StageSpec(MODELS["llama-70b"], H200, 20, ranks=4, link=LINKS["nvlink"]).seconds(shape)
    assert alone / 4 < free < alone / 3
    assert joined - free == pytest.approx(40 * LINKS["nvlink"].sum_s(1000 * 16384))


def test_more_ranks_than_kv_heads_keep_the_same_several_times():
    eight, sixteen = (StageSpec(MODELS["llama-405b"], H200, 126, ranks=ranks) for ranks in (8, 16))
    weights = 126 * MODELS["llama-405b"].layer_weights * 2
    of_rank = 126 * MODELS["llama-405b"].kv_bytes / 8
    assert sixteen.kv_tokens() == int((141e9 * 0.9 - weights / 16 - 4e9) / of_rank)
    read_s = [
        stage._attention_s(stage.model.layer_specs[0], BatchShape([(5000, 1)] * 100)) for stage in (eight, sixteen)
    ]
    assert read_s[0] == read_s[1]


def test_under_load_products_keep_within_the_power_limit():
    shape = BatchShape([(0, 4096)])
    moment, minutes = (StageSpec(MODELS["llama-70b"], device, 20).seconds(shape) for device in (H200, H200.sustained()))
    assert 1.12 * moment < minutes < 1.2 * moment


def test_the_kv_of_a_quarter_of_a_70b_model():
    """Another engine finds room for 1.06 million tokens on the same devices, in four stages."""
    tokens = StageSpec(MODELS["llama-70b"], H200, 20, has_head=True).kv_tokens()
    assert tokens == pytest.approx(1.06e6, rel=0.05)
    assert StageSpec(MODELS["llama-405b"], H200, 126).kv_tokens() == 0


def test_only_the_last_stage_pays_for_the_head():
    shape = BatchShape([(1000, 1)] * 8)
    head = StageSpec(MODELS["llama-70b"], H200, 20, has_head=True).seconds(shape)
    assert head - StageSpec(MODELS["llama-70b"], H200, 20).seconds(shape) == pytest.approx(2.1e9 / 3.6e12, rel=0.02)
