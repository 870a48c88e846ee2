"""Copies of arrays between host and device that the host does not wait for."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on `device` with the array's values. On a CPU it may share the array's memory.

    A GPU copies from pinned memory, which PyTorch does not reuse before the copy has ended.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the same shapes and dtypes on `device`, sent in one copy of one pinned buffer, on the current
    stream."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += _aligned(array.nbytes)
    # PyTorch's cache of pinned memory hands a block out again only after the copies from it have ended.
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
    """A copy of `tensor` on the host. From a GPU it is complete once an event recorded after this call has happened."""
    if tensor.device.type == "cpu":
        return tensor
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def reserve_pinned(most_bytes: int, count: int) -> None:
    """Fills PyTorch's cache of pinned memory for `count` copies at a time of any size up to `most_bytes`.

    The cache has blocks of powers of two, so this takes 2 to 4 times `count * most_bytes` bytes in all. Without it, a
    pipeline's first stage stood still for 60 to 160 ms whenever a step needed more pinned memory while a send waited.
    """
    sizes = [1 << n for n in range(9, max(most_bytes - 1, 1).bit_length() + 1)]
    _ = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(count)]


class PinnedBuffer(NamedTuple):
    """A buffer of uint8 on the host, as a tensor and as an array of the same memory."""

    bytes_: torch.Tensor
    array: np.ndarray
    event: torch.cuda.Event | None

    def begun(self) -> None:
        """Notes that a copy to or from the buffer has been launched on the current stream."""
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Waits until the last copy that was begun has ended."""
        if self.event is not None:
            self.event.synchronize()


class PinnedRing:
    """Host buffers of `size` bytes for asynchronous copies, used in turn; for a GPU they are pinned. `next` waits only
    if the last copy of the buffer whose turn it is has not ended yet."""

    def __init__(self, device: torch.device, size: int, count: int = 3) -> None:
        on_gpu = device.type == "cuda"
        self.buffers: list[PinnedBuffer] = []
        for _ in range(count):
            bytes_ = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
            self.buffers.append(PinnedBuffer(bytes_, bytes_.numpy(), torch.cuda.Event() if on_gpu else None))
        self._next = 0

    def next(self) -> PinnedBuffer:
        """The buffer whose last copy began longest ago, after that copy has ended."""
        return self.buffers[self.next_index()]

    def next_index(self) -> int:
        """As `next`: which of `buffers` it is."""
        index = self._next
        self._next = (index + 1) % len(self.buffers)
        self.buffers[index].wait()
        return index


class _HostPart:
    """A tensor's part of a host buffer, and how much of it the last array took."""

    __slots__ = ("first", "used", "values")

    def __init__(self, values: np.ndarray, first: int) -> None:
        """`first`: where it begins in the buffer, in bytes. The values are set to zero."""
        self.values, self.first, self.used = values, first, 0
        values[:] = 0

    def write(self, array: np.ndarray) -> None:
        """Sets the values to those of `array`, and zeros after them."""
        length = len(array)
        self.values[:length] = array
        if length < self.used:
            self.values[length : self.used] = 0
        self.used = length


class GraphInputs:
    """Tensors at fixed addresses that CUDA graphs read, filled from host arrays in one copy.

    `layout` gives each tensor's name, dtype (int32 or int64) and greatest length. The tensor whose length varies most
    should be the last: the copy ends with its array.
    """

    def __init__(self, device: torch.device, layout: dict[str, tuple[torch.dtype, int]]) -> None:
        places: dict[str, tuple[int, int, np.dtype]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        size = sum(_aligned(dtype.itemsize * length) for dtype, length in layout.values())
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        at = 0
        for name, (dtype, length) in layout.items():
            size = dtype.itemsize * length
            self._tensors[name] = self._device_bytes[at : at + size].view(dtype)
            places[name] = at, at + size, np.dtype(str(dtype).removeprefix("torch."))
            at += _aligned(size)
        self._last = list(layout)[-1]
        self._turns = PinnedRing(device, at)
        # By buffer. Views of a buffer would take longer to make in each step than to fill.
        self._parts = [
            {
                name: _HostPart(turn.array[first:last].view(dtype), first)
                for name, (first, last, dtype) in places.items()
            }
            for turn in self._turns.buffers
        ]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def fill(self, arrays: dict[str, np.ndarray]) -> None:
        """Sets the values of all tensors. An array may be shorter than its tensor: the rest becomes zeros, except in
        the last tensor, where it stays as it was."""
        index = self._turns.next_index()
        turn, parts = self._turns.buffers[index], self._parts[index]
        for name, part in parts.items():
            part.write(arrays[name])
        last = parts[self._last]
        end = last.first + last.used * last.values.itemsize
        self._device_bytes[:end].copy_(turn.bytes_[:end], non_blocking=True)
        turn.begun()


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
