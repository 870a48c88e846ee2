"""Random tensors in place of a checkpoint's, the same for any number of ranks."""

import math
import zlib
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from kernels.experts.mxfp4_weight import E2M1_SIZE, GROUP
from worker.checkpoint.destination import Destination
from worker.checkpoint.gpt_oss_experts import multiplied_out
from worker.checkpoint.tensors import ModelTensor, cut
from worker.models.parameters import is_norm

_EXPERTS = ("experts_gate_up", "experts_down")


def random_tensors(
    destinations: Mapping[str, Destination],
    has_gemma_norms: bool,
    in_mxfp4: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[ModelTensor]:
    """Tensors for all destinations. Each is made whole, from a seed that depends on its name only, and then cut.
    `has_gemma_norms`: whether norms multiply by one plus their weight. `in_mxfp4`: whether the experts' matrices are in
    MXFP4."""
    for name, destination in destinations.items():
        if in_mxfp4 and destination.parameter.endswith(_EXPERTS):
            kept = partial(_mxfp4, name, destination.shape, device)
            yield ModelTensor(name, destination.shape, partial(multiplied_out, kept, device, dtype), mxfp4=kept)
            continue
        read = partial(_part, name, destination, has_gemma_norms, device, dtype)
        yield ModelTensor(name, destination.shape, read)


def _mxfp4(
    name: str, shape: tuple[int, ...], device: torch.device, dim: int, part: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """A part of a matrix of random bits, whose scale keeps the size of its input."""
    experts, rows, columns = shape
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    blocks = torch.randint(
        0, 256, (experts, rows, columns // GROUP, GROUP // 2), dtype=torch.uint8, device=device, generator=generator
    )
    exponent = 127 + round(math.log2(columns**-0.5 / E2M1_SIZE))
    if dim == 2:
        part = range(part.start // GROUP, -(-part.stop // GROUP))
    own = cut(blocks, dim, part)
    return own, torch.full(own.shape[:3], exponent, dtype=torch.uint8, device=device)


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
