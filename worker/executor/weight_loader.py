"""Loads one rank's part of a model's weights, from disk or random, into the decoder's fused parameters, one tensor at a
time."""

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from kernels.linear.fp8_linear import Fp8Weight, quantize
from worker.models.config import DecoderConfig
from worker.models.parameters import parameter_shapes
from worker.models.sharding import Shard

Progress = Callable[[int, int], None]
"""Called with (tensors loaded so far, number of tensors) after each tensor."""

Parameters = dict[str, torch.Tensor | Fp8Weight]
"""Parameters by name, as `parameter_shapes` names them."""

_QUANTIZED = ("qkv", "out", "gate_up", "down")  # matrices of the layers: nearly all of a model's weights


class _Destination(NamedTuple):
    """Destination of a checkpoint's tensor of `shape`: its part `kept` along `dim` goes to `parameter`, from index
    `first` on along `dim`."""

    parameter: str
    first: int
    shape: tuple[int, ...]
    dim: int
    kept: range


class _Tensor(NamedTuple):
    """A tensor of a checkpoint. `read(dim, part)` reads only that part of it along a dimension."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[int, range], torch.Tensor]


def load_weights(
    model: Path,
    shard: Shard,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["auto", "dummy"] = "auto",
    progress: Progress | None = None,
    quantization: Literal["fp8"] | None = None,
) -> Parameters:
    """Returns a rank's parameters, named as in `parameter_shapes(shard.config)`, from a folder of safetensors.

    A rank reads only its own part, into `device`'s memory. `dummy` reads no tensors, and makes the same random weights
    for any number of ranks. With `quantization`, each matrix of the layers becomes an `Fp8Weight` as soon as it is
    complete. Raises ValueError if a file cannot be read, or a tensor is missing, unexpected or of the wrong shape.
    """
    config = shard.whole
    destinations = _destinations(shard)
    shapes = parameter_shapes(shard.config)
    parameters: dict[str, torch.Tensor] = {}
    quantized: dict[str, Fp8Weight] = {}
    missing = set(destinations)
    parts = Counter(destination.parameter for destination in destinations.values())
    for tensor in _tensors(model, destinations, config, device, dtype, load_format):
        if _is_ignored(tensor.name, config) or _is_elsewhere(tensor.name, shard):
            continue
        if tensor.name not in destinations:
            raise ValueError(f"{model} has a tensor that a {config.model_type} model does not: {tensor.name}")
        destination = destinations[tensor.name]
        if tensor.shape != destination.shape:
            raise ValueError(
                f"{model}: {tensor.name} has shape {tensor.shape}, but its configuration says {destination.shape}"
            )
        name = destination.parameter
        if name not in parameters:
            make = torch.empty if shard.size == 1 else torch.zeros  # padding of a rank's part is zero
            parameters[name] = make(shapes[name], device=device, dtype=_dtype(config, name, dtype))
        if len(destination.kept):
            target = parameters[name].narrow(destination.dim, destination.first, len(destination.kept))
            part = tensor.read(destination.dim, destination.kept)
            if device.type == "cuda" and part.device.type == "cpu":
                # All cores copy the file into pinned memory. The GPU fetches it from there while they go on.
                part = part.pin_memory()
            target.copy_(part, non_blocking=True)
        missing.discard(tensor.name)
        parts[name] -= 1
        if quantization is not None and not parts[name] and name.rpartition(".")[2] in _QUANTIZED:
            quantized[name] = Fp8Weight(*quantize(parameters.pop(name)))
        if progress is not None:
            progress(len(destinations) - len(missing), len(destinations))
    if missing:
        some = ", ".join(sorted(missing)[:4])
        raise ValueError(
            f"{model} lacks {len(missing)} of {len(destinations)} tensors: {some}{', …' if len(missing) > 4 else ''}"
        )
    if config.gemma_norms:
        for name in parameters:
            if _is_norm(name):
                parameters[name] += 1
    return {**parameters, **quantized}


def _destinations(shard: Shard) -> dict[str, _Destination]:
    """Destinations of all tensors of a model that this rank needs, by Hugging Face's names."""
    shapes = parameter_shapes(shard.config)
    vocabulary, hidden = (shard.whole.vocab_size, shard.whole.hidden_size), range(shard.whole.hidden_size)
    destinations = {
        "model.embed_tokens.weight": _Destination("embedding", 0, vocabulary, 0, shard.vocabulary),
        "model.norm.weight": _Destination("norm", 0, (len(hidden),), 0, hidden),
        "lm_head.weight": _Destination("head", 0, vocabulary, 0, shard.vocabulary),
    }
    layer = _layer_destinations(shard)
    for own, index in enumerate(shard.layers):
        for tensor, destination in layer.items():
            destinations[f"model.layers.{index}.{tensor}"] = destination._replace(
                parameter=f"layers.{own}.{destination.parameter}"
            )
    return {tensor: destination for tensor, destination in destinations.items() if destination.parameter in shapes}


def _layer_destinations(shard: Shard) -> dict[str, _Destination]:
    """Destinations of the tensors of any one layer, including biases and norms that the model may not have."""
    whole, own, hidden = shard.whole, shard.config, shard.whole.hidden_size
    q_rows, kv_rows, inner_rows = (
        whole.num_heads * whole.head_dim,
        whole.num_kv_heads * whole.head_dim,
        whole.intermediate_size,
    )
    q, kv, inner = _scaled(shard.heads, whole.head_dim), _scaled(shard.kv_heads, whole.head_dim), shard.intermediate
    first_k = own.num_heads * own.head_dim
    first_v = first_k + own.num_kv_heads * own.head_dim
    destinations: dict[str, _Destination] = {}
    for tensor, parameter, first, rows, kept in (
        ("self_attn.q_proj", "qkv", 0, q_rows, q),
        ("self_attn.k_proj", "qkv", first_k, kv_rows, kv),
        ("self_attn.v_proj", "qkv", first_v, kv_rows, kv),
        ("mlp.gate_proj", "gate_up", 0, inner_rows, inner),
        ("mlp.up_proj", "gate_up", own.intermediate_size, inner_rows, inner),
    ):
        destinations[f"{tensor}.weight"] = _Destination(parameter, first, (rows, hidden), 0, kept)
        destinations[f"{tensor}.bias"] = _Destination(f"{parameter}_bias", first, (rows,), 0, kept)
    for tensor, parameter, columns, kept in (
        ("self_attn.o_proj", "out", q_rows, q),
        ("mlp.down_proj", "down", inner_rows, inner),
    ):
        once = range(hidden if shard.rank == 0 else 0)  # only rank 0 has the bias: ranks' outputs are added up
        destinations[f"{tensor}.weight"] = _Destination(parameter, 0, (hidden, columns), 1, kept)
        destinations[f"{tensor}.bias"] = _Destination(f"{parameter}_bias", 0, (hidden,), 0, once)
    for tensor, parameter, size in (
        ("self_attn.q_norm", "q_norm", whole.head_dim),
        ("self_attn.k_norm", "k_norm", whole.head_dim),
        *((tensor, parameter, hidden) for tensor, parameter in _layer_norms(whole)),
    ):
        destinations[f"{tensor}.weight"] = _Destination(parameter, 0, (size,), 0, range(size))
    return destinations


def _layer_norms(config: DecoderConfig) -> list[tuple[str, str]]:
    if not config.sandwich_norms:
        return [("input_layernorm", "input_norm"), ("post_attention_layernorm", "mlp_norm")]
    return [
        ("input_layernorm", "input_norm"),
        ("post_attention_layernorm", "attention_out_norm"),
        ("pre_feedforward_layernorm", "mlp_norm"),
        ("post_feedforward_layernorm", "mlp_out_norm"),
    ]


def _scaled(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)


def _is_norm(name: str) -> bool:
    return name == "norm" or name.endswith("_norm")


def _dtype(config: DecoderConfig, name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if config.gemma_norms and _is_norm(name) else dtype


def _is_ignored(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor is not needed: rotary frequencies, in old checkpoints, or a second copy of tied embeddings."""
    return bool(re.search(r"rotary_emb\.inv_freq$", name)) or (config.tied_embeddings and name == "lm_head.weight")


def _is_elsewhere(name: str, shard: Shard) -> bool:
    """Whether the tensor belongs to another stage."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None:
        index = int(layer[1])
        return index < shard.whole.num_layers and index not in shard.layers
    if name == "model.embed_tokens.weight":
        return not shard.config.has_embedding
    return name in ("model.norm.weight", "lm_head.weight") and not shard.config.is_last


def _tensors(
    model: Path,
    destinations: dict[str, _Destination],
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str,
) -> Iterator[_Tensor]:
    if load_format == "dummy":
        return _dummies(destinations, config, device, dtype)
    return _safetensors(model)


def _safetensors(folder: Path) -> Iterator[_Tensor]:
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in list(file.keys()):
                    tensor = file.get_slice(name)
                    yield _Tensor(_full_name(name), tuple(tensor.get_shape()), partial(_cut, tensor))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def _full_name(name: str) -> str:
    """The name of a tensor in a model with a head. In a checkpoint of the layers alone, as embedding models have,
    names begin without `model.`."""
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


def _cut(tensor: Any, dim: int, part: range) -> torch.Tensor:
    """Cuts a part along a dimension out of a tensor, or of a file's slice, which is read only then."""
    return tensor[(slice(None),) * dim + (slice(part.start, part.stop),)]


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    paths = [folder / name for name in names]
    if absent := [path.name for path in paths if not path.exists()]:
        raise ValueError(f"{folder} lacks the weights {', '.join(absent)}")
    return paths


def _dummies(
    destinations: dict[str, _Destination], config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[_Tensor]:
    """Random tensors. Each is made whole, from a seed that depends on its name only, and then cut, so the model is the
    same for any number of ranks."""
    for name, destination in destinations.items():
        yield _Tensor(name, destination.shape, partial(_dummy_part, name, destination, config, device, dtype))


def _dummy_part(
    name: str,
    destination: _Destination,
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    part: range,
) -> torch.Tensor:
    return _cut(_dummy(name, destination, config, device, dtype), dim, part)


def _dummy(
    name: str, destination: _Destination, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """A random tensor. The scales are such that norms and matrices keep the size of their input, and logits are about
    1."""
    if _is_norm(destination.parameter):
        return torch.full(destination.shape, 0.0 if config.gemma_norms else 1.0, device=device, dtype=dtype)
    scale = 0.02 if len(destination.shape) == 1 else destination.shape[1] ** -0.5
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(destination.shape, device=device, dtype=dtype).normal_(0.0, scale, generator=generator)
