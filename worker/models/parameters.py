"""Parameters of the decoder by name: their shapes on one rank, and the linear layers made of them."""

from typing import Any

import torch

from kernels.linear.fp8_linear import Fp8Linear, Fp8Weight
from kernels.linear.linear import Linear
from worker.models.config import DecoderConfig


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the decoder's parameters, by name. Matrices are `[out, in]`. The rows of `qkv` and `gate_up` are
    stacked in the order that the names say."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, qkv_size = config.num_heads * head_dim, (config.num_heads + 2 * config.num_kv_heads) * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "qkv": (qkv_size, hidden),
        "out": (hidden, q_size),
        "mlp_norm": (hidden,),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = (qkv_size,)
    if config.out_bias:
        layer["out_bias"] = (hidden,)
    if config.mlp_bias:
        layer |= {"gate_up_bias": (2 * config.intermediate_size,), "down_bias": (hidden,)}
    if config.qk_norm:
        layer |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    if config.sandwich_norms:
        layer |= {"attention_out_norm": (hidden,), "mlp_out_norm": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {}
    if config.has_embedding:
        shapes["embedding"] = (config.vocab_rows, hidden)
    if config.is_last:
        shapes["norm"] = (hidden,)
        if not config.tied_embeddings:
            shapes["head"] = (config.vocab_rows, hidden)
    return shapes | {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}


def pop_layer(parameters: dict[str, Any], index: int, dtype: torch.dtype) -> dict[str, Any]:
    """Removes the parameters of layer `index`, and returns them by the names within a layer. Matrices and their biases
    become linear layers; `dtype` is that of the activations."""
    prefix = f"layers.{index}."
    own = {name.removeprefix(prefix): parameters.pop(name) for name in list(parameters) if name.startswith(prefix)}
    for name in ("qkv", "out", "gate_up", "down"):
        weight, bias = own[name], own.pop(f"{name}_bias", None)
        own[name] = Fp8Linear(weight, bias, dtype) if isinstance(weight, Fp8Weight) else Linear(weight, bias)
    return own
