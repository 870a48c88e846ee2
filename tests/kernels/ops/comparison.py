"""Random inputs of operators, and how far from the definition what they return may be."""

import torch

from tests.kernels.device import DEVICE, ON_GPU

# The interpreter has no bfloat16.
TOLERANCES = [(torch.float32, 2e-6), (torch.float16, 2e-3), *([(torch.bfloat16, 8e-3)] if ON_GPU else [])]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Within `tolerance` of the whole, as rounding is."""
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < tolerance, float(error)
