"""Numbers of 4 bits, e2m1 (Open Compute Project, Microscaling Formats 1.0), two in a byte."""

import torch

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor((*_POSITIVE, *(-number for number in _POSITIVE)))


def numbers(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of bytes, uint8 `[..., n]`, the first of each byte in its low bits: float32 `[..., 2 * n]`."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return _E2M1.to(packed.device)[codes.int()]
