"""A rank's weights, read from a model's folder into memory of the CPU."""

from pathlib import Path

import torch

from worker.executor.weight_loader import load_weights
from worker.models.config import decoder_config, read_config
from worker.models.sharding import Shard

CPU = torch.device("cpu")


def load(folder: Path, rank: int = 0, size: int = 1, load_format: str = "auto") -> dict[str, torch.Tensor]:
    shard = Shard(decoder_config(read_config(folder)), rank, size)
    return load_weights(folder, shard, CPU, torch.float32, load_format)
