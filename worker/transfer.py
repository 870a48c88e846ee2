"""Small arrays between host and device without waiting for either. On a CPU nothing is copied."""

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 16


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the same shapes and dtypes on `device`: one copy of one pinned buffer for all of them, in the order of
    the current stream."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    # Pinned memory comes from a cache that gives a block away again only after the copies from it are done.
    staged = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    bytes_ = staged.numpy()
    for start, array in zip(starts, arrays, strict=True):
        bytes_[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = staged.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the host. From a GPU it is there when an event recorded after this call has happened."""
    if tensor.device.type == "cpu":
        return tensor
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
