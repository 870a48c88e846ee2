"""GPU memory that other processes on the same machine read and write from their GPUs, through CUDA IPC handles.

A process need not see the other process's GPU (`CUDA_VISIBLE_DEVICES`). Its own GPU must be able to reach it.
"""

import ctypes
from pathlib import Path

import torch

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def machine() -> str:
    """An identifier that all processes of one machine have in common, until its next boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def export(memory: torch.Tensor) -> tuple[bytes, int]:
    """Returns what another process needs to open the memory: the handle of its allocation, and the offset in that in
    bytes. Raises OSError if CUDA does not share such an allocation."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(memory.data_ptr()))
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle), memory.data_ptr() - base.value


def open_exported(handle: bytes, offset: int) -> int:
    """The address, on this process's current GPU, of memory that another process exported. The memory stays open until
    this process ends. Raises OSError if the GPU cannot reach it."""
    base = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(base),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_LAZY_PEER_ACCESS),
    )
    return base.value + offset


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the driver, in the context of the current GPU. Raises OSError with the name of the error."""
    driver = ctypes.CDLL("libcuda.so.1")
    status = getattr(driver, name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'unknown error').decode()}")
