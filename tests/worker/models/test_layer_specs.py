"""The sizes from which costs are computed: layer by layer those of the decoder that is built, and of its KV cache."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from pipeline.roofline import DEVICES, StageSpec, make_stages
from pipeline.shape import BatchShape
from tests.worker.conftest import TINY
from worker.executor.memory_budget import layer_bytes, token_bytes
from worker.models.config import DecoderConfig, decoder_config, read_config
from worker.models.layer_specs import layer_specs, roofline_model
from worker.models.parameters import is_norm, parameter_shapes
from worker.models.sharding import Shard

H200 = DEVICES["h200"]


@pytest.fixture(scope="module")
def config_of(tiny_model: Callable[[str], Path]) -> Callable[[str], DecoderConfig]:
    return lambda name: decoder_config(read_config(tiny_model(name)))


@pytest.mark.parametrize("name", TINY)
def test_each_layer_has_the_matrices_of_the_decoder(name: str, config_of: Callable[[str], DecoderConfig]) -> None:
    config = config_of(name)
    expected = [0] * config.num_layers
    for parameter, shape in parameter_shapes(config).items():
        is_matrix = (
            len(shape) > 1 and not parameter.endswith((".conv", ".shared_gate", "_bias")) and not is_norm(parameter)
        )
        if is_matrix and parameter.startswith("layers."):
            expected[int(parameter.split(".")[1])] += math.prod(shape)
        elif parameter == "layer_inputs_projection":
            expected[0] += math.prod(shape)
    assert [layer.all_weights for layer in layer_specs(config)] == expected
    assert roofline_model("", config).all_weights == sum(expected)


def test_experts_in_mxfp4_are_a_quarter(config_of: Callable[[str], DecoderConfig]) -> None:
    """Of what a step reads, not of what it multiplies. So more sequences fit next to them."""
    plain = config_of("gpt_oss")
    assert plain.experts is not None
    packed = replace(plain, experts=replace(plain.experts, in_mxfp4=True))
    own, other = layer_specs(packed)[0], layer_specs(plain)[0]
    assert own.all_weights - own.weights == round((other.all_weights - other.weights) * 4.25 / 16)
    assert own.multiplied == other.multiplied
    stages = [StageSpec(roofline_model("", config), H200, config.num_layers) for config in (packed, plain)]
    assert stages[0].kv_tokens(0.5, 0.0) > stages[1].kv_tokens(0.5, 0.0)


@pytest.mark.parametrize("name", TINY)
def test_each_layer_keeps_the_bytes_of_the_cache(name: str, config_of: Callable[[str], DecoderConfig]) -> None:
    config, dtype = config_of(name), torch.bfloat16
    layers = layer_specs(config)
    kept = [layer_bytes(config, index, dtype) if index in config.kv_layers else 0 for index in range(config.num_layers)]
    assert [layer.kv * dtype.itemsize for layer in layers] == kept
    stage = StageSpec(roofline_model("", config), H200, config.num_layers)
    weights = sum(layer.all_weights for layer in layers) * 2
    assert stage.kv_tokens(0.5, 0.0) == int((H200.memory_bytes * 0.5 - weights) / token_bytes(config, dtype))


def test_gemma_4_reads_what_earlier_layers_keep(config_of: Callable[[str], DecoderConfig]) -> None:
    config = config_of("gemma4")
    layers = layer_specs(config)
    shared = [index for index in range(config.num_layers) if config.of_layer(index).kv_before]
    assert shared
    for index in shared:
        source = layers[index - config.of_layer(index).kv_before]
        assert layers[index].kv == 0 and layers[index].read_kv == source.kv > 0
        assert layers[index].attended == source.attended and layers[index].window == source.window
    assert len({layer.attended for layer in layers}) == 2, "windows have heads of another size"


def test_a_window_limits_what_a_step_reads(config_of: Callable[[str], DecoderConfig]) -> None:
    """Beyond it, more context costs only what the other layers read."""
    model = roofline_model("", config_of("gemma4"))
    full = [layer for layer in model.layer_specs if layer.window is None]
    (stage,) = make_stages(model, H200, 1)
    short, long = (stage.seconds(BatchShape.decoding(4, 4 * context)) for context in (10_000, 60_000))
    read = 4 * 50_000 * sum(layer.read_kv for layer in full) * 2
    assert long - short == pytest.approx(read / H200.attention_bytes_per_s)
    first, later = (stage.seconds(BatchShape([(start, 64)])) for start in (10_000, 60_000))
    pairs_s = 4 * 64 * 50_000 * sum(layer.attended for layer in full) / H200.attention_flops
    prefixes_s = 50_000 * sum(layer.read_kv for layer in full) * 2 / H200.attention_bytes_per_s
    assert later - first == pytest.approx(pairs_s + prefixes_s)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_a_step_reads_and_writes_states_whatever_the_context(
    name: str, config_of: Callable[[str], DecoderConfig]
) -> None:
    config = config_of(name)
    layers = layer_specs(config)
    assert config.recurrent is not None
    assert [layer.state_bytes > 0 for layer in layers] == list(config.recurrent.layers)
    assert all((layer.kv == 0) == (layer.state_bytes > 0) for layer in layers)


def test_stages_are_cut_by_what_layers_cost() -> None:
    """A model of Gemma 4's kind and of a size that matters: its last layers have twice the MLP, and stay together."""
    sizes = {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 20,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size": 32768,
        "vocab_size_per_layer_input": 32768,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 4,
    }
    config = decoder_config(AutoConfig.for_model("gemma4_text", **sizes))
    parts = [Shard(config, stage=stage, stages=2).layers for stage in range(2)]
    layers = layer_specs(config)
    head = config.vocab_size * config.hidden_size
    costs = [sum(layers[index].all_weights for index in part) for part in parts]
    costs[-1] += head
    most = max(layer.all_weights for layer in layers)
    assert abs(costs[0] - costs[1]) <= most and len(parts[1]) < len(parts[0])
    stages = make_stages(roofline_model("", config), H200, 2, cut=parts)
    assert [stage.first for stage in stages] == [part.start for part in parts]
    shape = BatchShape.decoding(8, 8 * 1000)
    slow, fast = sorted((stage.seconds(shape) for stage in stages), reverse=True)
    assert slow / fast < 1.25
