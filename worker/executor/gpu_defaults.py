"""Defaults that depend on the GPU, for settings that a configuration leaves open: the schedule, the largest step, and
the number of sequences that run at once.

Every rank of a replica derives the same values by itself, from the model's sizes and the memory of a device.
"""

from dataclasses import replace
from pathlib import Path

import torch

from kernels.linear.fp8_linear import CAPABILITY
from pipeline.roofline import DEVICES, make_stages
from worker.config import AUTO_DTYPES, WorkerConfig
from worker.executor.memory_budget import GPU_MEMORY_FRACTION, row_bytes
from worker.models.config import DecoderConfig, decoder_config, in_memory, read_config
from worker.models.layer_specs import roofline_model
from worker.models.sharding import Shard

GPU_TOKEN_BUDGET = 8192  # prefill is compute-bound from some 1,000 tokens on; longer steps only make attention cheaper
# `max_running` is the number of sequences of this length that the KV cache holds. Most sequences of a chat are longer
# (Azure's conversation trace: 1,200 tokens on average), so memory limits the number of running sequences, not slots. A
# limit above MAX_RUNNING gained nothing on an H200, where decodes of an 8B model are compute-bound by then.
TOKENS_A_SEQUENCE = 512
MIN_RUNNING, MAX_RUNNING = 64, 1024
STATES_FRACTION = 0.15  # of a GPU's memory, at most for the recurrent states of running sequences
RESERVED_BYTES = 4e9  # activations and graphs, roughly


def resolve_device(config: WorkerConfig) -> tuple[torch.device, torch.dtype]:
    """Returns the device and dtype of a configuration, with defaults for `auto`. Raises ValueError if it asks for a GPU
    and there is none, or if the GPU or the dtype does not support the quantization."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ValueError("device is cuda, but PyTorch finds no GPU: set device to cpu or auto")
    on_gpu = config.device == "cuda" or (config.device == "auto" and has_gpu)
    device = "cuda" if on_gpu else "cpu"
    name = AUTO_DTYPES[device] if config.dtype == "auto" else config.dtype
    if config.quantization == "fp8" and on_gpu:
        if (capability := torch.cuda.get_device_capability()) < CAPABILITY:
            own = ".".join(map(str, capability))
            raise ValueError(f"quantization is fp8, for GPUs from compute capability 8.9 on; this one has {own}")
        if name == "float32":
            raise ValueError(
                "quantization is fp8, which on a GPU does not go with dtype float32: set dtype to bfloat16"
            )
    return torch.device(device), getattr(torch, name)


def with_gpu_defaults(config: WorkerConfig, model: Path) -> WorkerConfig:
    """Returns the configuration with a GPU's defaults for the settings that it leaves open; unchanged on a CPU. `model`
    is the model's folder or file. Raises ValueError as `resolve_device` does."""
    if resolve_device(config)[0].type == "cpu":
        return config
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return on_gpu(config, decoder_config(read_config(model)), memory_bytes)


def on_gpu(config: WorkerConfig, model: DecoderConfig, memory_bytes: int) -> WorkerConfig:
    """Like `with_gpu_defaults`, for GPUs with `memory_bytes` of memory each."""
    said = config.model_fields_set
    settled: dict[str, object] = {"schedule": config.schedule or "uniform"}
    if "token_budget" not in said:
        settled["token_budget"] = GPU_TOKEN_BUDGET
    if "max_running" not in said:
        settled["max_running"] = most_running(config, model, memory_bytes)
    return config.model_copy(update=settled)


def most_running(config: WorkerConfig, model: DecoderConfig, memory_bytes: int) -> int:
    """Returns the default of `max_running`: the number of sequences of `TOKENS_A_SEQUENCE` tokens that the KV cache
    holds, or fewer if each has recurrent states, rounded down to a multiple of 16, at least `MIN_RUNNING` and at most
    `MAX_RUNNING`."""
    tokens = config.kv_tokens
    if tokens is None:
        model = in_memory(model, "cuda", config.dtype, config.dequantize)
        device = replace(DEVICES["h200"], memory_bytes=float(memory_bytes))
        cut = [Shard(model, stage=stage, stages=config.pp, cut=config.cut).layers for stage in range(config.pp)]
        stages = make_stages(roofline_model("", model), device, config.pp, config.tp, cut=cut)
        fraction = config.kv_memory_fraction or GPU_MEMORY_FRACTION
        tokens = min(stage.kv_tokens(fraction, RESERVED_BYTES) for stage in stages)
    count = tokens // TOKENS_A_SEQUENCE // 16 * 16
    if (states := row_bytes(model, torch.bfloat16) / config.num_ranks) > 0:
        count = min(count, int(memory_bytes * STATES_FRACTION / states) // 16 * 16)
    return min(MAX_RUNNING, max(MIN_RUNNING, count))
