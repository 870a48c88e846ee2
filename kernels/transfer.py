"""Arrays between host and device, without anybody waiting for the copy."""

from collections.abc import Sequence
from typing import NamedTuple

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


def reserve_pinned(most_bytes: int, count: int) -> None:
    """Has PyTorch keep memory that cannot be paged out for `count` copies at a time of any size up to `most_bytes`: 2
    to 4 times `count * most_bytes` in all. It keeps a block of each power of two for those who ask for so much."""
    sizes = [1 << n for n in range(9, max(most_bytes - 1, 1).bit_length() + 1)]
    _ = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(count)]


class Turn(NamedTuple):
    """A buffer on the host, as PyTorch and as NumPy see it: uint8."""

    bytes_: torch.Tensor
    array: np.ndarray
    event: torch.cuda.Event | None

    def begun(self) -> None:
        """The copy to or from the buffer is under way on the current stream."""
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Until the last copy that was begun has ended."""
        if self.event is not None:
            self.event.synchronize()


class Turns:
    """Buffers of `size` bytes for copies that nobody waits for, used in turn: on the host, and for a GPU in memory that
    cannot be paged out. One that comes up again is waited for."""

    def __init__(self, device: torch.device, size: int, count: int = 3) -> None:
        on_gpu = device.type == "cuda"
        self._turns = []
        for _ in range(count):
            bytes_ = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
            self._turns.append(Turn(bytes_, bytes_.numpy(), torch.cuda.Event() if on_gpu else None))
        self._next = 0

    def next(self) -> Turn:
        """The buffer whose last copy began the longest ago, and has ended."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        turn.wait()
        return turn


class StaticArrays:
    """Tensors of fixed addresses, which CUDA graphs read, filled from host arrays in one copy.

    `layout` has the tensors' dtypes, int32 or int64, and greatest lengths by name. The one whose length varies most
    goes last: what lies beyond it is not copied.
    """

    def __init__(self, device: torch.device, layout: dict[str, tuple[torch.dtype, int]]) -> None:
        self._places: dict[str, tuple[int, int, np.dtype]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        size = sum(_aligned(dtype.itemsize * length) for dtype, length in layout.values())
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        at = 0
        for name, (dtype, length) in layout.items():
            size = dtype.itemsize * length
            self._tensors[name] = self._device_bytes[at : at + size].view(dtype)
            self._places[name] = at, at + size, np.dtype(str(dtype).removeprefix("torch."))
            at += _aligned(size)
        self._last = list(layout)[-1]
        self._turns = Turns(device, at)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def fill(self, arrays: dict[str, np.ndarray]) -> None:
        """Values of all tensors. Each array may be shorter than its tensor: beyond it stand zeros, in the last one what
        stood there before."""
        turn = self._turns.next()
        end = 0
        for name, (first, last, dtype) in self._places.items():
            part, array = turn.array[first:last].view(dtype), arrays[name]
            part[: len(array)] = array
            if name == self._last:
                end = first + len(array) * dtype.itemsize
            elif len(array) < len(part):
                part[len(array) :] = 0
        self._device_bytes[:end].copy_(turn.bytes_[:end], non_blocking=True)
        turn.begun()


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
