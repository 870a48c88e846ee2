"""Loads one rank's part of a model's weights, from disk or random, into the decoder's fused parameters, one tensor at a
time."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch

from kernels.experts.mxfp4_weight import Mxfp4Weight
from kernels.linear.any_linear import AnyWeight
from kernels.linear.fp8_format import GROUP
from kernels.linear.fp8_linear import Fp8Weight, multiplies, quantize
from worker.checkpoint.block_parameters import BlockParameters
from worker.checkpoint.destination import Destination, TensorPiece
from worker.checkpoint.destinations import destinations
from worker.checkpoint.formats import model_tensors
from worker.checkpoint.fp8_parameters import Fp8Parameters
from worker.checkpoint.mxfp4_parameters import Mxfp4Parameters
from worker.checkpoint.random_tensors import random_tensors
from worker.checkpoint.tensor_names import full_name, is_elsewhere, is_ignored
from worker.checkpoint.tensors import ModelTensor
from worker.models.config import DecoderConfig
from worker.models.parameters import is_norm, parameter_shapes
from worker.models.sharding import Shard

Progress = Callable[[int, int], None]
"""Called with (tensors loaded so far, number of tensors) after each tensor."""

Parameters = dict[str, AnyWeight | Mxfp4Weight]
"""Parameters by name, as `parameter_shapes` names them."""

Kept = Literal["numbers", "blocks", "fp8", "mxfp4"]
"""How a parameter is in memory: in floating point, or as its format has it."""

_FLOAT32 = (".choice_bias", ".sinks", ".decay_log", ".decay_bias", ".step_bias", ".skip", ".expert_scales")
_QUANTIZED = ("qkv", "q_b", "out", "gate_up", "down")  # matrices of the layers: nearly all of a model's weights
_EXPERTS = ("experts_gate_up", "experts_down")
_EXPERT_DEVICES = ("cuda",)  # devices that multiply with experts in 4 and 8 bits
_IN_BLOCKS = (*_QUANTIZED, "embedding", "head")


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
    complete. Matrices of a quantized checkpoint stay as they are where the device multiplies with them, unless
    `dequantize` is set.

    Raises ValueError if a file cannot be read, or a tensor is missing, unexpected or of the wrong shape, or
    if the model has experts and is to be quantized.
    """
    _check_quantization(quantization, shard.whole)
    wanted, tensors = _matched(model, shard, device, dtype, load_format)
    shapes = parameter_shapes(shard.config)
    formats = _kept_formats(device, dtype, quantization, dequantize)
    kept = _kept(wanted, tensors, shapes, formats, device)
    loading = _Loading(shard, device, dtype, shapes, kept)
    parts = Counter(destination.parameter for destination in wanted.values())
    for done, tensor in enumerate(tensors, 1):
        name = wanted[tensor.name].parameter
        loading.add(tensor, wanted[tensor.name])
        parts[name] -= 1
        if not parts[name]:
            loading.finish(name, quantization is not None)
        if progress is not None:
            progress(done, len(wanted))
    return loading.parameters


def _check_quantization(quantization: str | None, config: DecoderConfig) -> None:
    if quantization is not None and config.experts is not None:
        raise ValueError(f"quantization {quantization} does not support models with experts: leave it out")
    if quantization is not None and config.recurrent is not None:
        raise ValueError(f"quantization {quantization} does not support recurrent layers: leave it out")


def _matched(
    model: Path, shard: Shard, device: torch.device, dtype: torch.dtype, load_format: str
) -> tuple[dict[str, Destination], list[ModelTensor]]:
    """The destinations of a rank's tensors by their full names, and these tensors. Raises ValueError unless each
    destination has one tensor, of its shape."""
    config = shard.whole
    if load_format == "dummy":
        wanted = destinations(shard, stacked=True)
        in_mxfp4 = config.experts is not None and config.experts.in_mxfp4
        return wanted, list(random_tensors(wanted, config.gemma_norms, in_mxfp4, device, dtype))
    stored = model_tensors(model, config, device, dtype)
    found = [tensor._replace(name=full_name(tensor.name, config.family)) for tensor in stored]
    of_all = (".mlp.experts.gate_up_proj", ".mlp.experts.up_proj")
    wanted = destinations(shard, any(name in tensor.name for tensor in found for name in of_all))
    tensors = [
        tensor for tensor in found if not is_ignored(tensor.name, config) and not is_elsewhere(tensor.name, shard)
    ]
    for tensor in tensors:
        if tensor.name not in wanted:
            raise ValueError(f"{model} has a tensor that a {config.model_type} model does not: {tensor.name}")
        if tensor.shape != (shape := wanted[tensor.name].shape):
            raise ValueError(f"{model}: {tensor.name} has shape {tensor.shape}, but its configuration says {shape}")
    if missing := wanted.keys() - {tensor.name for tensor in tensors}:
        some = ", ".join(sorted(missing)[:4])
        raise ValueError(
            f"{model} lacks {len(missing)} of {len(wanted)} tensors: {some}{', …' if len(missing) > 4 else ''}"
        )
    return wanted, tensors


def _kept_formats(
    device: torch.device, dtype: torch.dtype, quantization: str | None, dequantize: bool
) -> frozenset[Kept]:
    """The formats of checkpoints that the device multiplies with."""
    if dequantize:
        return frozenset()
    if device.type == "cpu":
        return frozenset(("blocks",)) if quantization is None else frozenset(("fp8",))
    if dtype != torch.bfloat16:
        return frozenset()
    return frozenset(("fp8", "mxfp4") if torch.cuda.get_device_capability(device) >= (8, 0) else ("fp8",))


def _kept(
    wanted: Mapping[str, Destination],
    tensors: list[ModelTensor],
    shapes: Mapping[str, tuple[int, ...]],
    formats: frozenset[Kept],
    device: torch.device,
) -> dict[str, Kept]:
    """How each parameter is kept: in a format that all of its tensors have, or in floating point."""
    kept: dict[str, Kept] = {}
    for tensor in tensors:
        name = wanted[tensor.name].parameter
        last = name.rpartition(".")[2]
        own: Kept = "numbers"
        if any(piece.factor != 1.0 for piece in wanted[tensor.name].pieces):
            kept[name] = own
            continue
        if "blocks" in formats and tensor.blocks is not None and last in _IN_BLOCKS:
            own = "blocks"
        elif "fp8" in formats and tensor.fp8 is not None and last in _QUANTIZED:
            own = "fp8" if multiplies(device, shapes[name], tensor.has_groups) else "numbers"
        elif "fp8" in formats and tensor.fp8 is not None and last in _EXPERTS:
            own = "fp8" if device.type in _EXPERT_DEVICES else "numbers"
        elif "mxfp4" in formats and tensor.mxfp4 is not None and device.type in _EXPERT_DEVICES:
            own = "mxfp4"
        if own == "fp8" and tensor.has_groups and _cuts_groups(wanted[tensor.name]):
            own = "numbers"
        kept[name] = own if kept.get(name, own) == own else "numbers"
    return kept


def _cuts_groups(destination: Destination) -> bool:
    """Whether a rank's part of a matrix begins or ends inside of a group of columns that have a scale."""
    columns = destination.shape[1]
    return destination.dim == 1 and any(
        part.kept.start % GROUP > 0 or (part.kept.stop % GROUP > 0 and part.kept.stop < columns)
        for part in destination.pieces
        if len(part.kept)
    )


class _Loading:
    """A rank's parameters while their tensors are read. `parameters` has those that are complete."""

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        dtype: torch.dtype,
        shapes: Mapping[str, tuple[int, ...]],
        kept: Mapping[str, Kept],
    ) -> None:
        self.parameters: Parameters = {}
        self._config, self._is_whole = shard.whole, shard.size == 1
        self._device, self._dtype, self._shapes, self._kept = device, dtype, shapes, kept
        self._blocks, self._fp8 = BlockParameters(shapes), Fp8Parameters(shapes, device)
        self._mxfp4 = Mxfp4Parameters(shapes, device)
        self._numbers: dict[str, torch.Tensor] = {}

    def add(self, tensor: ModelTensor, destination: Destination) -> None:
        """Reads a tensor's pieces into its parameter."""
        name, dim = destination.parameter, destination.dim
        kept = self._kept[name]
        if kept == "numbers" and name not in self._numbers:
            make = torch.empty if self._is_whole else torch.zeros  # padding of a rank's part is zero
            self._numbers[name] = make(self._shapes[name], device=self._device, dtype=self._dtype_of(name))
        for piece in destination.pieces:
            if kept == "blocks":
                assert tensor.blocks is not None
                self._blocks.add(name, tensor.blocks, dim, piece.first, piece.kept, piece.row_order)
            elif kept == "fp8":
                assert tensor.fp8 is not None
                self._fp8.add(name, tensor.fp8, dim, piece.first, piece.kept, piece.row_order, destination.expert)
            elif kept == "mxfp4":
                assert tensor.mxfp4 is not None
                self._mxfp4.add(name, tensor.mxfp4, dim, piece.first, piece.kept)
            else:
                whole = self._numbers[name]
                _copy(tensor, dim, piece, whole if destination.expert is None else whole[destination.expert])

    def finish(self, name: str, in_8_bits: bool) -> None:
        """Completes a parameter, all of whose tensors were added. `in_8_bits`: whether a matrix of the layers that is
        in floating point is rounded to 8 bits."""
        if self._kept[name] == "blocks":
            self.parameters[name] = self._blocks.finish(name, self._dtype)
        elif self._kept[name] == "fp8":
            self.parameters[name] = self._fp8.finish(name)
        elif self._kept[name] == "mxfp4":
            self.parameters[name] = self._mxfp4.finish(name)
        else:
            numbers = self._numbers.pop(name)
            if self._config.gemma_norms and is_norm(name):
                weights = numbers if numbers.ndim == 1 else numbers[0]  # the others are biases
                weights += 1
            is_rounded = in_8_bits and name.rpartition(".")[2] in _QUANTIZED
            self.parameters[name] = Fp8Weight(*quantize(numbers)) if is_rounded else numbers

    def _dtype_of(self, name: str) -> torch.dtype:
        has_float32_norms = self._config.gemma_norms or self._config.float32_norms
        is_float32 = (has_float32_norms and is_norm(name)) or name.endswith(_FLOAT32)
        return torch.float32 if is_float32 else self._dtype


def _copy(tensor: ModelTensor, dim: int, piece: TensorPiece, target: torch.Tensor) -> None:
    """Copies a piece of a tensor to its place in `target`."""
    if not len(piece.kept):
        return
    part = tensor.read(dim, piece.kept)
    if (order := piece.row_order) is not None:
        part = part[order.to(part.device)]
    if piece.factor != 1.0:
        part = part.to(target.dtype) * piece.factor
    if target.device.type == "cuda" and part.device.type == "cpu":
        # All cores copy the file into pinned memory. The GPU fetches it from there while they go on.
        part = part.pin_memory()
    target.narrow(dim, piece.first, len(piece.kept)).copy_(part, non_blocking=True)
