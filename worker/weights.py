"""A model's weights from disk into the decoder's own fused parameters, a tensor at a time."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from worker.models.config import DecoderConfig
from worker.models.decoder import parameter_shapes

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all) after each one."""


class _Place(NamedTuple):
    """Where a checkpoint's tensor goes: rows `first` to `first + shape[0]` of a parameter."""

    parameter: str
    first: int
    shape: tuple[int, ...]


def load_weights(
    model: Path,
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Parameters as `parameter_shapes(config)` names them, from a folder of safetensors or from a `.gguf` file.

    Safetensors need the model's size in memory and one tensor more; a GGUF file, which transformers dequantises as a
    whole, twice the size. Raises ValueError if a tensor is missing, unexpected or of the wrong shape.
    """
    places = _places(config)
    shapes = parameter_shapes(config)
    parameters = {
        name: torch.empty(shape, device=device, dtype=_dtype(config, name, dtype)) for name, shape in shapes.items()
    }
    missing = set(places)
    source = _gguf_tensors(model) if model.suffix == ".gguf" else _safetensors(model)
    for name, tensor in source:
        if _is_ignored(name, config):
            continue
        if name not in places:
            raise ValueError(f"{model} has a tensor that a {config.model_type} model does not: {name}")
        place = places[name]
        if tuple(tensor.shape) != place.shape:
            raise ValueError(
                f"{model}: {name} has shape {tuple(tensor.shape)}, but its configuration says {place.shape}"
            )
        target = parameters[place.parameter]
        target[place.first : place.first + place.shape[0]].copy_(tensor)
        missing.discard(name)
        if progress is not None:
            progress(len(places) - len(missing), len(places))
    if missing:
        some = ", ".join(sorted(missing)[:4])
        raise ValueError(
            f"{model} lacks {len(missing)} of {len(places)} tensors: {some}{', …' if len(missing) > 4 else ''}"
        )
    if config.gemma_norms:
        for name in parameters:
            if _is_norm(name):
                parameters[name] += 1
    return parameters


def _places(config: DecoderConfig) -> dict[str, _Place]:
    """Hugging Face's names of all tensors of such a model, and where each goes."""
    shapes = parameter_shapes(config)
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "qkv": [("self_attn.q_proj", q_rows), ("self_attn.k_proj", kv_rows), ("self_attn.v_proj", kv_rows)],
        "gate_up": [("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)],
        "out": [("self_attn.o_proj", config.hidden_size)],
        "down": [("mlp.down_proj", config.hidden_size)],
        "q_norm": [("self_attn.q_norm", config.head_dim)],
        "k_norm": [("self_attn.k_norm", config.head_dim)],
        "input_norm": [("input_layernorm", config.hidden_size)],
        "mlp_norm": [("post_attention_layernorm", config.hidden_size)],
    }
    if config.sandwich_norms:
        parts |= {
            "attention_out_norm": [("post_attention_layernorm", config.hidden_size)],
            "mlp_norm": [("pre_feedforward_layernorm", config.hidden_size)],
            "mlp_out_norm": [("post_feedforward_layernorm", config.hidden_size)],
        }
    outer = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    places = {outer[name]: _Place(name, 0, shape) for name, shape in shapes.items() if name in outer}
    for name, shape in shapes.items():
        if name in outer:
            continue
        _, index, short = name.split(".")
        suffix, first = ("bias" if short.endswith("_bias") else "weight"), 0
        for part, rows in parts[short.removesuffix("_bias")]:
            places[f"model.layers.{index}.{part}.{suffix}"] = _Place(name, first, (rows, *shape[1:]))
            first += rows
    return places


def _is_norm(name: str) -> bool:
    return name == "norm" or name.endswith("_norm")


def _dtype(config: DecoderConfig, name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if config.gemma_norms and _is_norm(name) else dtype


def _is_ignored(name: str, config: DecoderConfig) -> bool:
    """Old checkpoints carry the rotary frequencies, and some a second copy of tied embeddings."""
    return bool(re.search(r"rotary_emb\.inv_freq$", name)) or (config.tied_embeddings and name == "lm_head.weight")


def _safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                for name in names:
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


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


def _gguf_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    yield from model.state_dict().items()
