"""Random tensors in place of a checkpoint's, the same for any number of ranks."""

import zlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from worker.checkpoint.destinations import Destination
from worker.checkpoint.tensors import ModelTensor, cut
from worker.models.parameters import is_norm


def random_tensors(
    destinations: Mapping[str, Destination], has_gemma_norms: bool, device: torch.device, dtype: torch.dtype
) -> Iterator[ModelTensor]:
    """Tensors for all destinations. Each is made whole, from a seed that depends on its name only, and then cut.
    `has_gemma_norms`: whether norms multiply by one plus their weight."""
    for name, destination in destinations.items():
        read = partial(_part, name, destination, has_gemma_norms, device, dtype)
        yield ModelTensor(name, destination.shape, read)


def _part(
    name: str,
    destination: Destination,
    has_gemma_norms: bool,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    part: range,
) -> torch.Tensor:
    return cut(_random(name, destination, has_gemma_norms, device, dtype), dim, part)


def _random(
    name: str, destination: Destination, has_gemma_norms: bool, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """A random tensor. The scales are such that norms and matrices keep the size of their input, and logits are about
    1."""
    if is_norm(destination.parameter):
        return torch.full(destination.shape, 0.0 if has_gemma_norms else 1.0, device=device, dtype=dtype)
    scale = 0.02 if len(destination.shape) == 1 else destination.shape[-1] ** -0.5
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(destination.shape, device=device, dtype=dtype).normal_(0.0, scale, generator=generator)
