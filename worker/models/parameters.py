"""Parameters of the decoder by name: their shapes on one rank, and the linear layers made of them."""

from typing import Any

import torch

from kernels.attention.interface import LatentHeads
from kernels.linear.any_linear import make_linear
from worker.models.config import DecoderConfig
from worker.models.experts import ExpertsConfig
from worker.models.recurrent_layer import RecurrentConfig

_LINEARS = (
    *("qkv", "q_b", "out", "gate_up", "down", "router", "latent_in", "latent_out"),
    *("layer_input_gate", "layer_input_out"),
)


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the decoder's parameters, by name. Matrices are `[out, in]`. The rows of `qkv` and `gate_up` are
    stacked in the order that the names say; MLPs and experts without a gate have ups alone in `gate_up`. Gates of heads
    come after the values. Those of experts are `[experts, out, in]`."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.has_embedding:
        shapes["embedding"] = (config.vocab_rows, config.hidden_size)
    if config.is_first and config.learned_positions:
        shapes["positions"] = (config.learned_positions, config.hidden_size)
    if config.is_first and (inputs := config.layer_inputs) is not None:
        size = inputs.size * inputs.layers
        shapes |= {
            "layer_inputs_embedding": (config.vocab_rows, size),
            "layer_inputs_projection": (size, config.hidden_size),
            "layer_inputs_norm": (inputs.size,),
        }
    if config.is_last:
        shapes["norm"] = _norm_shape(config)
        if not config.tied_embeddings:
            shapes["head"] = (config.vocab_rows, config.hidden_size)
        if config.head_bias:
            shapes["head_bias"] = (config.vocab_rows,)
    for index in range(config.num_layers):
        experts, own, recurrent = config.experts_of(index), config.of_layer(index), config.recurrent
        layer: dict[str, tuple[int, ...]] = {}
        if recurrent is not None and recurrent.layers[index]:
            layer |= _recurrent_shapes(own, recurrent)
        elif config.has_attention(index):
            layer |= _attention_shapes(own)
        if config.has_mlp(index):
            layer |= _mlp_norm_shapes(config)
            layer |= _mlp_shapes(own) if experts is None else _expert_shapes(config, experts)
        if config.layer_inputs is not None:
            size, hidden = config.layer_inputs.size, config.hidden_size
            layer |= {"layer_input_gate": (size, hidden), "layer_input_out": (hidden, size)}
            layer["layer_input_norm"] = (hidden,)
        if config.layer_scales:
            layer["scale"] = (1,)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "qkv": (config.qkv_size, hidden),
        "out": (hidden, config.attended_size),
    }
    if config.latent is not None:
        layer |= _latent_shapes(config, config.latent)
    if config.pre_norms:
        layer["input_norm"] = _norm_shape(config)
    if config.qkv_bias:
        layer["qkv_bias"] = (config.qkv_size,)
    if config.out_bias:
        layer["out_bias"] = (hidden,)
    if config.qk_norm in ("head", "after"):
        layer["q_norm"] = (head_dim,)
        if not config.kv_before:
            layer["k_norm"] = (head_dim,)
    elif config.qk_norm == "all":
        layer |= {"q_norm": (q_size,), "k_norm": (kv_size,)}
    if config.has_sinks:
        layer["sinks"] = (config.num_heads,)
    if config.sandwich_norms:
        layer["attention_out_norm"] = (hidden,)
    return layer


def _recurrent_shapes(config: DecoderConfig, recurrent: RecurrentConfig) -> dict[str, tuple[int, ...]]:
    """Alongside attention, `qkv` has attention's rows before those of the states, and `out` has attention's columns
    before."""
    layer = recurrent.parameter_shapes(config.hidden_size)
    if config.sandwich_norms:
        layer["attention_out_norm"] = (config.hidden_size,)
    if not recurrent.alongside_attention:
        return layer
    (rows, hidden), (_, columns) = layer["qkv"], layer["out"]
    both = {"qkv": (config.qkv_size + rows, hidden), "out": (hidden, config.attended_size + columns)}
    return layer | _attention_shapes(config) | both


def _mlp_norm_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {}
    if config.pre_norms and config.parallel != "one norm":
        layer["mlp_norm"] = _norm_shape(config)
    if config.sandwich_norms:
        layer["mlp_out_norm"] = (config.hidden_size,)
    return layer


def _norm_shape(config: DecoderConfig) -> tuple[int, ...]:
    """The shape of a norm of the hidden states: its weights, or rows of weights and biases."""
    rows = 2 if config.norm_biases else 1
    return (rows, config.hidden_size) if config.layer_norms else (config.hidden_size,)


def _latent_shapes(config: DecoderConfig, latent: LatentHeads) -> dict[str, tuple[int, ...]]:
    """Parameters of latent attention besides `qkv` and `out`. The rows of `qkv` are those of the queries, or of their
    own latent, then those of the latent and the rotated key. `kv_b` has each head's key before its value."""
    layer: dict[str, tuple[int, ...]] = {
        "kv_a_norm": (latent.kv_lora_rank,),
        "kv_b": (config.num_heads * latent.up, latent.kv_lora_rank),
    }
    if config.q_lora_rank is not None:
        layer |= {
            "q_a_norm": (config.q_lora_rank,),
            "q_b": (config.num_heads * latent.query, config.q_lora_rank),
        }
    return layer


def _mlp_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, size = config.hidden_size, config.intermediate_size
    rows = (2 if config.gated_mlps else 1) * size
    layer: dict[str, tuple[int, ...]] = {"gate_up": (rows, hidden), "down": (hidden, size)}
    if config.mlp_bias:
        layer |= {"gate_up_bias": (rows,), "down_bias": (hidden,)}
    return layer


def _expert_shapes(config: DecoderConfig, experts: ExpertsConfig) -> dict[str, tuple[int, ...]]:
    hidden, size = config.hidden_size, experts.intermediate_size
    halves, width = 2 if config.gated_mlps else 1, experts.latent_size or hidden
    layer: dict[str, tuple[int, ...]] = {
        "router": (experts.count, hidden),
        "experts_gate_up": (len(experts.own), halves * size, width),
        "experts_down": (len(experts.own), width, size),
    }
    if experts.latent_size is not None:
        layer |= {"latent_in": (width, hidden), "latent_out": (hidden, width)}
    if experts.has_bias:
        layer["choice_bias"] = (experts.count,)
    if experts.has_product_biases:
        layer["router_bias"] = (experts.count,)
        own = len(experts.own)
        layer |= {"experts_gate_up_bias": (own, halves * size), "experts_down_bias": (own, hidden)}
    if experts.shared_size:
        layer |= {"gate_up": (halves * experts.shared_size, hidden), "down": (hidden, experts.shared_size)}
    if experts.has_shared_gate:
        layer["shared_gate"] = (1, hidden)
    if experts.is_beside_mlp:
        layer["expert_scales"] = (experts.count,)
        layer |= dict.fromkeys(("router_norm", "experts_norm", "shared_out_norm", "experts_out_norm"), (hidden,))
    return layer


def is_norm(name: str) -> bool:
    """Whether a parameter is the weight of a norm."""
    return name == "norm" or name.endswith("_norm")


def pop_layer(parameters: dict[str, Any], index: int, dtype: torch.dtype) -> dict[str, Any]:
    """Removes the parameters of layer `index`, and returns them by the names within a layer. Matrices and their biases
    become linear layers; `dtype` is that of the activations."""
    prefix = f"layers.{index}."
    own = {name.removeprefix(prefix): parameters.pop(name) for name in list(parameters) if name.startswith(prefix)}
    for name in _LINEARS:
        if name not in own:
            continue
        weight, bias = own[name], own.pop(f"{name}_bias", None)
        own[name] = make_linear(weight, bias, dtype)
    return own
