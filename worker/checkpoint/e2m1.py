"""Numbers of 4 bits, e2m1 (Open Compute Project, Microscaling Formats 1.0), two in a byte."""

import torch

from kernels.experts.mxfp4_weight import E2M1

NUMBERS = torch.tensor((*E2M1, *(-number for number in E2M1)))
"""By code, float32 `[16]`: from code 8 on those of the first half, negative."""


def numbers(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of bytes, uint8 `[..., n]`, the first of each byte in its low bits: float32 `[..., 2 * n]`."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return NUMBERS.to(packed.device)[codes.int()]
