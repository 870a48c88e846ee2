"""Arrays between host and device, without anybody waiting for the copy."""

from collections.abc import Sequence

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on `device` with the array's values. On a CPU it may share the array's memory.

    A GPU copies from memory that cannot be paged out, which torch reuses no sooner than the copy has ended.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the same shapes and dtypes on `device`: one copy of one pinned buffer for all of them, in the order of
    the current stream."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += _aligned(array.nbytes)
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


class StaticArrays:
    """Tensors of fixed addresses, which CUDA graphs read, filled from host arrays in one copy.

    `capacities` are the tensors' greatest lengths by name; all are int32 or int64, as `dtypes` says. The one whose
    length varies most goes last: what lies beyond it is not copied.
    """

    def __init__(self, device: torch.device, layout: dict[str, tuple[torch.dtype, int]]) -> None:
        self._places: dict[str, tuple[int, np.dtype]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        size = sum(_aligned(dtype.itemsize * length) for dtype, length in layout.values())
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        at = 0
        for name, (dtype, length) in layout.items():
            size = dtype.itemsize * length
            self._tensors[name] = self._device_bytes[at : at + size].view(dtype)
            self._places[name] = at, np.dtype(str(dtype).removeprefix("torch."))
            at += _aligned(size)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def fill(self, arrays: dict[str, np.ndarray]) -> None:
        """Values of all tensors. Each array may be shorter than its tensor: beyond it stand zeros, in the last one what
        stood there before."""
        last = list(self._places)[-1]
        end = self._places[last][0] + self._places[last][1].itemsize * len(arrays[last])
        host = torch.empty(end, dtype=torch.uint8, pin_memory=self._device_bytes.is_cuda)
        raw = host.numpy()
        for name, (at, dtype) in self._places.items():
            array = arrays[name]
            part = raw[at : at + self._tensors[name].nbytes].view(dtype) if name != last else raw[at:].view(dtype)
            part[: len(array)] = array
            part[len(array) :] = 0
        self._device_bytes[:end].copy_(host, non_blocking=True)


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
