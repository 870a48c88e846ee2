"""The formats of checkpoints. A format gives the tensors of a model from the tensors that the files have.

| format | module | what a matrix can be kept as |
| --- | --- | --- |
| numbers in floating point | | |
| `fp8` | `fp8.py` | 8 bits |
| `compressed-tensors` | `compressed_tensors.py`, with NVFP4 by `nvfp4.py` | 8 bits; blocks of integers |
| `modelopt` | `modelopt.py`, through `fp8.py` and `nvfp4.py` | 8 bits |
| `awq`, `gptq` | `awq.py`, `gptq.py`, both through `packed_matrix.py` | blocks of integers |
| `mxfp4` of gpt-oss | `gpt_oss_experts.py` | 4 bits |
| GGUF | `gguf_file.py` | blocks of integers |
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from worker.checkpoint import awq, compressed_tensors, fp8, gguf_file, gptq, modelopt
from worker.checkpoint.gpt_oss_experts import arranged
from worker.checkpoint.safetensors_files import stored_tensors
from worker.checkpoint.tensors import ModelTensor, StoredTensor, transposed
from worker.models.config import DecoderConfig, quantization_config, read_config
from worker.models.quantization import Method, Quantization, quantization

CheckpointFormat = Callable[[list[StoredTensor], Quantization, torch.device], Iterable[ModelTensor]]
"""Gives the tensors of a model, by the names of its modules, from those of its files. Numbers are multiplied out on the
device. Raises ValueError for files that the format does not explain."""

FORMATS: Mapping[Method, CheckpointFormat] = {
    "fp8": fp8.model_tensors,
    "compressed-tensors": compressed_tensors.model_tensors,
    "modelopt": modelopt.model_tensors,
    "awq": awq.model_tensors,
    "gptq": gptq.model_tensors,
}


def model_tensors(model: Path, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> list[ModelTensor]:
    """The tensors of a folder, by the names in its files, whichever format they are in. Nothing but names, shapes and
    a few small tensors are read yet. Raises ValueError if a file cannot be read, or is not as its format says."""
    stored, family = stored_tensors(model), config.family
    if family.in_turns:
        return list(arranged(stored, device, dtype))
    format_ = quantization(quantization_config(read_config(model)))
    tensors = _plain(stored, config) if format_ is None else FORMATS[format_.method](stored, format_, device)
    return [*tensors, *_gguf(model)]


def _plain(stored: list[StoredTensor], config: DecoderConfig) -> Iterator[ModelTensor]:
    for name, shape, _, read in stored:
        if name.endswith(config.family.turned) and _is_turned(name, shape, config.hidden_size):
            yield ModelTensor(name, (*shape[:-2], shape[-1], shape[-2]), transposed(read, len(shape)))
        else:
            yield ModelTensor(name, shape, read)


def _is_turned(name: str, shape: tuple[int, ...], hidden_size: int) -> bool:
    """Whether a matrix that may be `[in, out]` is: experts are where their sizes say nothing else."""
    return len(shape) == 2 or hidden_size == shape[2 if name.endswith(".down_proj") else 1]


def _gguf(model: Path) -> Iterator[ModelTensor]:
    if gguf_file.has_gguf(model):
        for matrix in gguf_file.matrices(model):
            yield ModelTensor(matrix.name, matrix.shape, matrix.dense, matrix.blocks)
