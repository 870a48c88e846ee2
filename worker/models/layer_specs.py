"""Sizes of a model's layers in the form that costs are computed from: the cut into stages, predicted times, memory."""

from dataclasses import replace

import torch

from pipeline.roofline import LayerSpec, ModelSpec
from worker.models.config import DecoderConfig
from worker.models.recurrent_layer import RecurrentConfig

_NOTHING = LayerSpec(weights=0, inner=0, kv=0, read_kv=0, kv_heads=1, attended=0)


def layer_specs(config: DecoderConfig) -> tuple[LayerSpec, ...]:
    """Returns the sizes of each layer. Those of the first one include the product that makes the inputs of all
    layers."""
    return tuple(_layer_spec(config, index) for index in range(config.num_layers))


def _layer_spec(config: DecoderConfig, index: int) -> LayerSpec:
    own, experts, recurrent = config.of_layer(index), config.experts_of(index), config.recurrent
    hidden, products = config.hidden_size, 3 if config.gated_mlps else 2
    if recurrent is not None and recurrent.layers[index]:
        layer = _with_states(_attention_spec(own, index) if recurrent.alongside_attention else _NOTHING, own, recurrent)
    else:
        layer = _attention_spec(own, index) if config.has_attention(index) else _NOTHING
    weights = layer.weights
    if (inputs := config.layer_inputs) is not None:
        weights += 2 * hidden * inputs.size
        if index == 0 and config.is_first:
            weights += hidden * inputs.size * inputs.layers
    if not config.has_mlp(index):
        return replace(layer, weights=weights)
    if experts is None:
        return replace(layer, weights=weights + products * hidden * own.intermediate_size, inner=own.intermediate_size)
    always = experts.count + products * experts.shared_size + 2 * (experts.latent_size or 0)
    return replace(
        layer,
        weights=weights + hidden * always,
        inner=experts.routing.top_k * experts.intermediate_size + experts.shared_size,
        experts=experts.count,
        chosen=experts.routing.top_k,
        expert_weights=products * (experts.latent_size or hidden) * experts.intermediate_size,
        expert_bytes=experts.weight_bytes,
    )


def _attention_spec(own: DecoderConfig, index: int) -> LayerSpec:
    """The sizes of attention; `own` has those of layer `index` for all layers."""
    kv = own.num_kv_heads * own.head_dim * (2 if own.latent is None else 1)
    attended = own.num_heads * ((own.query_size + own.output_size) // 2)
    kept = 0 if own.kv_before else kv
    return LayerSpec(own.attention_weights, 0, kept, kv, own.num_kv_heads, attended, own.windows[index])


def _with_states(layer: LayerSpec, config: DecoderConfig, recurrent: RecurrentConfig) -> LayerSpec:
    """`layer` with recurrent states."""
    weights = config.hidden_size * (sum(recurrent.projected_sizes) + recurrent.attended_size)
    return replace(layer, weights=layer.weights + weights, state_bytes=recurrent.states.row_bytes(torch.bfloat16))


def roofline_model(name: str, config: DecoderConfig) -> ModelSpec:
    """Returns the sizes of a model in the form that the roofline takes."""
    experts = config.experts
    model = ModelSpec(
        name,
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        (config.query_size + config.output_size) // 2,
        config.vocab_size,
        config.gated_mlps,
    )
    if config.latent is not None:
        model = replace(model, latent=config.latent.row, latent_weights=config.attention_weights)
    if experts is not None:
        model = replace(
            model,
            experts=experts.count,
            chosen=experts.routing.top_k,
            expert_inner=experts.intermediate_size,
            shared_inner=experts.shared_size,
            dense_layers=experts.layers.count(False),
        )
    own = layer_specs(config)
    return model if model.layer_specs == own else replace(model, own_layers=own)
