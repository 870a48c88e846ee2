"""Loads one rank's part of a model's weights, from disk or random, into the decoder's fused parameters, one tensor at a
time."""

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from kernels.linear.any_linear import AnyWeight
from kernels.linear.fp8_linear import Fp8Weight, quantize
from worker.executor import gguf_file, gpt_oss_experts
from worker.executor.block_parameters import BlockParameters, ReadBlocks
from worker.executor.delta_net_weights import net_tensors
from worker.models.config import DecoderConfig
from worker.models.parameters import parameter_shapes
from worker.models.sharding import Shard

Progress = Callable[[int, int], None]
"""Called with (tensors loaded so far, number of tensors) after each tensor."""

Parameters = dict[str, AnyWeight]
"""Parameters by name, as `parameter_shapes` names them."""

_FUSED_QKV = ("phi3",)  # families with one tensor for queries, keys and values
_FUSED_GATE_UP = ("phi3", "glm", "glm4", "granitemoeshared")  # and with one for gates and ups
_SANDWICH_NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}
_GLM4_NORMS = {
    "input_layernorm": "input_norm",
    "post_self_attn_layernorm": "attention_out_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_mlp_layernorm": "mlp_out_norm",
}
# The names of experts in checkpoints, and those of `_expert_destinations`: Mixtral's, Granite's, Qwen2's and Ernie's.
_EXPERT_NAMES = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.experts\.(\d+)\.w1\."), r".experts.\1.gate_proj."),
    (re.compile(r"\.experts\.(\d+)\.w3\."), r".experts.\1.up_proj."),
    (re.compile(r"\.experts\.(\d+)\.w2\."), r".experts.\1.down_proj."),
    (re.compile(r"\.mlp\.input_linear\.weight$"), ".mlp.experts.gate_up_proj"),
    (re.compile(r"\.mlp\.output_linear\.weight$"), ".mlp.experts.down_proj"),
    (re.compile(r"\.mlp\.router(\.layer)?\.(weight|bias)$"), r".mlp.gate.\2"),
    (re.compile(r"\.shared_mlp\.input_linear\."), ".mlp.shared_experts.gate_up_proj."),
    (re.compile(r"\.shared_mlp\.output_linear\."), ".mlp.shared_experts.down_proj."),
    (re.compile(r"\.mlp\.shared_expert\."), ".mlp.shared_experts."),
    (re.compile(r"\.mlp\.(gate\.)?moe_statics\.e_score"), ".mlp.gate.e_score"),
)
_FLOAT32 = (".choice_bias", ".sinks", ".decay_log", ".decay_bias")
_QUANTIZED = ("qkv", "out", "gate_up", "down")  # matrices of the layers: nearly all of a model's weights


class _Piece(NamedTuple):
    """The elements `kept` of a checkpoint's tensor along a dimension, which a parameter has from `first` on. `order` is
    that of `Rope.order` if they are heads, whose dimensions are rearranged."""

    first: int
    kept: range
    order: tuple[int, ...] | None = None


class _Destination(NamedTuple):
    """Destination of a checkpoint's tensor of `shape`: its `pieces` along `dim` go to `parameter`. `expert` is the
    index in the parameter's first dimension, which the tensor lacks; None if it has all dimensions."""

    parameter: str
    shape: tuple[int, ...]
    dim: int
    pieces: tuple[_Piece, ...]
    expert: int | None = None


class _Tensor(NamedTuple):
    """A tensor of a checkpoint. `read(dim, part)` reads only that part of it along a dimension; `blocks` likewise, if
    its format can be kept."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[int, range], torch.Tensor]
    blocks: ReadBlocks | None = None


def load_weights(
    model: Path,
    shard: Shard,
    device: torch.device,
    dtype: torch.dtype,
    load_format: Literal["auto", "dummy"] = "auto",
    progress: Progress | None = None,
    quantization: Literal["fp8"] | None = None,
    dequantize: bool = False,
) -> Parameters:
    """Returns a rank's parameters, named as in `parameter_shapes(shard.config)`, from a folder of safetensors, or one
    that refers to a GGUF file.

    A rank reads only its own part, into `device`'s memory. `dummy` reads no tensors, and makes the same random weights
    for any number of ranks. With `quantization`, each matrix of the layers becomes an `Fp8Weight` as soon as it is
    complete. On a CPU, matrices whose format has blocks keep them, unless `dequantize` or `quantization` are set.

    Raises ValueError if a file cannot be read, or a tensor is missing, unexpected or of the wrong shape, or
    if the model has experts and is to be quantized.
    """
    config = shard.whole
    if quantization is not None and config.experts is not None:
        raise ValueError(f"quantization {quantization} does not support models with experts: leave it out")
    if quantization is not None and config.delta_net is not None:
        raise ValueError(f"quantization {quantization} does not support gated delta nets: leave it out")
    destinations = _destinations(shard, load_format == "dummy" or _has_stacked_experts(model, config))
    shapes = parameter_shapes(shard.config)
    parameters: dict[str, torch.Tensor] = {}
    quantized: dict[str, AnyWeight] = {}
    kept = BlockParameters(shapes)
    keeps = device.type == "cpu" and quantization is None and not dequantize
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
        has_blocks = keeps and tensor.blocks is not None and name not in parameters
        if not has_blocks and name not in parameters:
            make = torch.empty if shard.size == 1 else torch.zeros  # padding of a rank's part is zero
            parameters[name] = make(shapes[name], device=device, dtype=_dtype(config, name, dtype))
        for piece in destination.pieces:
            if has_blocks and tensor.blocks is not None:
                order = _row_order(piece)
                kept.add(name, tensor.blocks, destination.dim, piece.first, piece.kept, order)
                continue
            target = parameters[name] if destination.expert is None else parameters[name][destination.expert]
            _copy(tensor, destination.dim, piece, target)
        missing.discard(tensor.name)
        parts[name] -= 1
        if has_blocks and not parts[name]:
            quantized[name] = kept.finish(name, dtype)
            continue
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


def _copy(tensor: _Tensor, dim: int, piece: _Piece, target: torch.Tensor) -> None:
    """Copies a piece of a tensor to its place in `target`."""
    if not len(piece.kept):
        return
    part = tensor.read(dim, piece.kept)
    if piece.order is not None:
        part = part[_row_order(piece)]
    if target.device.type == "cuda" and part.device.type == "cpu":
        # All cores copy the file into pinned memory. The GPU fetches it from there while they go on.
        part = part.pin_memory()
    target.narrow(dim, piece.first, len(piece.kept)).copy_(part, non_blocking=True)


def _row_order(piece: _Piece) -> torch.Tensor | None:
    """The order of a piece's rows; None if it is their own."""
    if piece.order is None:
        return None
    return torch.arange(len(piece.kept)).unflatten(0, (-1, len(piece.order)))[:, list(piece.order)].flatten()


def _whole(parameter: str, shape: tuple[int, ...], kept: range | None = None) -> _Destination:
    """The destination of a tensor of which the first elements of a parameter are the part `kept`, by default all."""
    return _Destination(parameter, shape, 0, (_Piece(0, range(shape[0]) if kept is None else kept),))


def _destinations(shard: Shard, stacked: bool) -> dict[str, _Destination]:
    """Destinations of all tensors of a model that this rank needs, by Hugging Face's names. `stacked`: whether the
    experts of a layer are one tensor."""
    shapes = parameter_shapes(shard.config)
    vocabulary, hidden = (shard.whole.vocab_size, shard.whole.hidden_size), shard.whole.hidden_size
    destinations = {
        "model.embed_tokens.weight": _whole("embedding", vocabulary, shard.vocabulary),
        "model.norm.weight": _whole("norm", (hidden,)),
        "lm_head.weight": _whole("head", vocabulary, shard.vocabulary),
    }
    for own, index in enumerate(shard.layers):
        layer = _attention_destinations(shard, index) | _norm_destinations(shard.whole)
        experts = shard.config.experts_of(own)
        if experts is None:
            layer |= _mlp_destinations(shard, "mlp", shard.whole.intermediate_size, shard.intermediate)
        else:
            layer |= _expert_destinations(shard, stacked)
        for tensor, destination in layer.items():
            destinations[f"model.layers.{index}.{tensor}"] = destination._replace(
                parameter=f"layers.{own}.{destination.parameter}"
            )
    return {tensor: destination for tensor, destination in destinations.items() if destination.parameter in shapes}


def _attention_destinations(shard: Shard, index: int) -> dict[str, _Destination]:
    """Destinations of the tensors of the attention of layer `index`, or of what it has in place of one."""
    net, order = shard.whole.delta_net, shard.whole.ropes[index].order
    if net is not None and net.layers[index]:
        return _net_destinations(shard)
    return _head_destinations(shard, order) if shard.whole.latent is None else _latent_destinations(shard, order)


def _head_destinations(shard: Shard, order: tuple[int, ...] | None) -> dict[str, _Destination]:
    """`_attention_destinations` of attention over keys and values, including biases and norms that the model may not
    have."""
    whole, own, hidden = shard.whole, shard.config, shard.whole.hidden_size
    size = whole.head_dim
    q_rows, kv_rows = whole.num_heads * size, whole.num_kv_heads * size
    q, kv = _scaled(shard.heads, size), _scaled(shard.kv_heads, size)
    first_k = own.num_heads * size
    first_v = first_k + own.num_kv_heads * size
    destinations = _outward("self_attn.o_proj", "out", shard, q_rows, q)
    if whole.model_type in _FUSED_QKV:
        k, v = (range(kv.start + rows, kv.stop + rows) for rows in (q_rows, q_rows + kv_rows))
        all_pieces = _Piece(0, q, order), _Piece(first_k, k, order), _Piece(first_v, v)
        rows = q_rows + 2 * kv_rows
        destinations["self_attn.qkv_proj.weight"] = _Destination("qkv", (rows, hidden), 0, all_pieces)
    else:
        queries: tuple[_Piece, ...] = (_Piece(0, q, order),)
        if whole.output_gate:  # the rows of each head's queries are followed by those of its gate
            parts = [(i * size, 2 * head * size) for i, head in enumerate(shard.heads)]
            first_gate = first_v + own.num_kv_heads * size
            queries = tuple(_Piece(to, range(row, row + size), order) for to, row in parts)
            queries += tuple(_Piece(first_gate + to, range(row + size, row + 2 * size)) for to, row in parts)
        for tensor, rows, pieces in (
            ("self_attn.q_proj", (2 if whole.output_gate else 1) * q_rows, queries),
            ("self_attn.k_proj", kv_rows, (_Piece(first_k, kv, order),)),
            ("self_attn.v_proj", kv_rows, (_Piece(first_v, kv),)),
        ):
            destinations[f"{tensor}.weight"] = _Destination("qkv", (rows, hidden), 0, pieces)
            destinations[f"{tensor}.bias"] = _Destination("qkv_bias", (rows,), 0, pieces)
    all_heads = whole.qk_norm == "all"
    for tensor, parameter, rows, kept in (
        ("self_attn.q_norm", "q_norm", q_rows, q),
        ("self_attn.k_norm", "k_norm", kv_rows, kv),
    ):
        piece = (_Piece(0, kept if all_heads else range(size), order),)
        destinations[f"{tensor}.weight"] = _Destination(parameter, (rows if all_heads else size,), 0, piece)
    destinations["self_attn.sinks"] = _whole("sinks", (whole.num_heads,), shard.heads)
    return destinations


def _latent_destinations(shard: Shard, order: tuple[int, ...] | None) -> dict[str, _Destination]:
    """`_attention_destinations` of latent attention. `order` is that of the rotated part of a head, which is the last
    part. All ranks have what makes the latents."""
    whole, own, hidden = shard.whole, shard.config, shard.whole.hidden_size
    latent, rank = whole.latent, whole.q_lora_rank
    assert latent is not None
    q_rows, q = whole.num_heads * latent.query, _scaled(shard.heads, latent.query)
    q_pieces = (_Piece(0, q, _behind(latent.qk_nope_head_dim, order)),)
    row = (_Piece(own.qkv_size - latent.row, range(latent.row), _behind(latent.kv_lora_rank, order)),)
    up_rows, up = whole.num_heads * latent.up, (_Piece(0, _scaled(shard.heads, latent.up)),)
    values = _scaled(shard.heads, latent.v_head_dim)
    destinations = _outward("self_attn.o_proj", "out", shard, whole.num_heads * latent.v_head_dim, values) | {
        "self_attn.kv_a_proj_with_mqa.weight": _Destination("qkv", (latent.row, hidden), 0, row),
        "self_attn.kv_a_layernorm.weight": _whole("kv_a_norm", (latent.kv_lora_rank,)),
        "self_attn.kv_b_proj.weight": _Destination("kv_b", (up_rows, latent.kv_lora_rank), 0, up),
    }
    if rank is None:
        destinations["self_attn.q_proj.weight"] = _Destination("qkv", (q_rows, hidden), 0, q_pieces)
        return destinations
    return destinations | {
        "self_attn.q_a_proj.weight": _whole("qkv", (rank, hidden)),
        "self_attn.q_a_layernorm.weight": _whole("q_a_norm", (rank,)),
        "self_attn.q_b_proj.weight": _Destination("q_b", (q_rows, rank), 0, q_pieces),
    }


def _behind(first: int, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The order of a head whose first elements stay, and whose others have an order of their own."""
    return None if order is None else (*range(first), *(first + place for place in order))


def _net_destinations(shard: Shard) -> dict[str, _Destination]:
    """Destinations of the tensors of a layer's gated delta net."""
    return {
        f"linear_attn.{name}": _Destination(to.parameter, to.shape, to.dim, tuple(_Piece(*part) for part in to.parts))
        for name, to in net_tensors(shard).items()
    }


def _mlp_destinations(
    shard: Shard, name: str, rows: int, kept: range, parameters: tuple[str, str] = ("gate_up", "down")
) -> dict[str, _Destination]:
    """Destinations of the tensors of the gated MLP `name`, of whose `rows` intermediate elements this rank has
    `kept`."""
    gate_up, down = parameters
    hidden, own_rows = shard.whole.hidden_size, -(-rows // shard.size)
    destinations = _outward(f"{name}.down_proj", down, shard, rows, kept)
    ups = range(kept.start + rows, kept.stop + rows)
    if shard.whole.model_type in _FUSED_GATE_UP:
        pieces = _Piece(0, kept), _Piece(own_rows, ups)
        destinations[f"{name}.gate_up_proj.weight"] = _Destination(gate_up, (2 * rows, hidden), 0, pieces)
        return destinations
    for tensor, first in ((f"{name}.gate_proj", 0), (f"{name}.up_proj", own_rows)):
        piece = (_Piece(first, kept),)
        destinations[f"{tensor}.weight"] = _Destination(gate_up, (rows, hidden), 0, piece)
        destinations[f"{tensor}.bias"] = _Destination(f"{gate_up}_bias", (rows,), 0, piece)
    return destinations


def _outward(tensor: str, parameter: str, shard: Shard, columns: int, kept: range) -> dict[str, _Destination]:
    """Destinations of a matrix that ends a sublayer, and of its bias."""
    hidden = shard.whole.hidden_size
    once = range(hidden if shard.rank == 0 else 0)  # only rank 0 has the bias: ranks' outputs are added up
    return {
        f"{tensor}.weight": _Destination(parameter, (hidden, columns), 1, (_Piece(0, kept),)),
        f"{tensor}.bias": _whole(f"{parameter}_bias", (hidden,), once),
    }


def _expert_destinations(shard: Shard, stacked: bool) -> dict[str, _Destination]:
    """Destinations of the tensors of a layer's experts, by the names of `_canonical`."""
    experts, hidden = shard.whole.experts, shard.whole.hidden_size
    assert experts is not None
    rows, kept, own_rows = (
        experts.intermediate_size,
        shard.expert_intermediate,
        -(-experts.intermediate_size // shard.size),
    )
    destinations = _mlp_destinations(shard, "mlp.shared_experts", experts.shared_size, shard.shared_intermediate)
    destinations["mlp.shared_expert_gate.weight"] = _whole("shared_gate", (1, hidden))
    destinations["mlp.gate.weight"] = _whole("router", (experts.count, hidden))
    destinations["mlp.gate.bias"] = _whole("router_bias", (experts.count,))
    destinations["mlp.gate.e_score_correction_bias"] = _whole("choice_bias", (experts.count,))
    if stacked:
        pieces = _Piece(0, kept), _Piece(own_rows, range(kept.start + rows, kept.stop + rows))
        shape = experts.count, 2 * rows, hidden
        destinations["mlp.experts.gate_up_proj"] = _Destination("experts_gate_up", shape, 1, pieces)
        shape = experts.count, hidden, rows
        destinations["mlp.experts.down_proj"] = _Destination("experts_down", shape, 2, (_Piece(0, kept),))
        biases = experts.count, 2 * rows
        destinations["mlp.experts.gate_up_proj_bias"] = _Destination("experts_gate_up_bias", biases, 1, pieces)
        once = (_Piece(0, range(hidden if shard.rank == 0 else 0)),)
        biases = experts.count, hidden
        destinations["mlp.experts.down_proj_bias"] = _Destination("experts_down_bias", biases, 1, once)
        return destinations
    for expert in range(experts.count):
        own = _mlp_destinations(shard, f"mlp.experts.{expert}", rows, kept, ("experts_gate_up", "experts_down"))
        destinations |= {name: to._replace(expert=expert) for name, to in own.items() if name.endswith(".weight")}
    return destinations


def _norm_destinations(config: DecoderConfig) -> dict[str, _Destination]:
    if config.model_type == "glm4":
        names = _GLM4_NORMS
    elif not config.pre_norms:
        names = {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "mlp_out_norm"}
    elif config.sandwich_norms:
        names = _SANDWICH_NORMS
    else:
        names = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
    return {f"{tensor}.weight": _whole(parameter, (config.hidden_size,)) for tensor, parameter in names.items()}


def _scaled(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)


def _is_norm(name: str) -> bool:
    return name == "norm" or name.endswith("_norm")


def _dtype(config: DecoderConfig, name: str, dtype: torch.dtype) -> torch.dtype:
    is_float32 = (config.gemma_norms and _is_norm(name)) or name.endswith(_FLOAT32)
    return torch.float32 if is_float32 else dtype


def _is_ignored(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor is not needed: rotary frequencies, in old checkpoints; a second copy of tied embeddings; what a
    hybrid has for images and drafts."""
    if config.delta_net is not None and name.startswith(("model.visual.", "mtp.")):
        return True
    return bool(re.search(r"rotary_emb\.inv_freq$", name)) or (config.tied_embeddings and name == "lm_head.weight")


def _is_elsewhere(name: str, shard: Shard) -> bool:
    """Whether the tensor belongs to another stage."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None:
        index = int(layer[1])
        return index < shard.whole.num_layers + shard.whole.extra_layers and index not in shard.layers
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
    if config.model_type == "gpt_oss":
        return (
            _Tensor(*tensor)
            for tensor in gpt_oss_experts.arranged((tensor[:3] for tensor in _safetensors(model)), device, dtype)
        )
    return chain(_safetensors(model), _gguf(model)) if gguf_file.has_gguf(model) else _safetensors(model)


def _gguf(folder: Path) -> Iterator[_Tensor]:
    for matrix in gguf_file.matrices(folder):
        yield _Tensor(matrix.name, matrix.shape, matrix.dense, matrix.blocks)


def _safetensors(folder: Path) -> Iterator[_Tensor]:
    for path in _shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in list(file.keys()):
                    tensor = file.get_slice(name)
                    shape = tuple(tensor.get_shape())
                    if name.endswith("moe_statics.e_score_correction_bias"):  # of one group of experts
                        shape, tensor = shape[1:], tensor[0]
                    yield _Tensor(_full_name(name), shape, partial(_cut, tensor))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}") from error


def _full_name(name: str) -> str:
    """The name of a tensor in a model with a head, as `_destinations` has it. In a checkpoint of the layers alone, as
    embedding models have, names begin without `model.`. Names of experts differ by family."""
    name = name.replace("model.language_model.", "model.", 1)  # next to a vision part
    if ".mlp." in name or ".block_sparse_moe." in name or ".shared_mlp." in name:
        for pattern, new in _EXPERT_NAMES:
            name = pattern.sub(new, name)
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


def _has_stacked_experts(model: Path, config: DecoderConfig) -> bool:
    """Whether a checkpoint has one tensor for all experts of a layer, in place of one for each."""
    if config.experts is None:
        return False
    return any(".mlp.experts.gate_up_proj" in tensor.name for tensor in _safetensors(model))


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
    scale = 0.02 if len(destination.shape) == 1 else destination.shape[-1] ** -0.5
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(destination.shape, device=device, dtype=dtype).normal_(0.0, scale, generator=generator)
