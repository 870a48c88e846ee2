"""What the GPUs of this machine draw. Under a power limit, and not under that of time, a bubble is no loss of its own:
stages that wait less compute more slowly."""

import os
import time
from typing import Any


class Energy:
    """From its making on, or since the last `read`, by the counters of NVML; nothing where they cannot be had."""

    def __init__(self, devices: int) -> None:
        """Of the first so many that a process which starts here would use."""
        self._handles: list[Any] = []
        if not devices:
            return
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [_handle(pynvml, which) for which in _visible(pynvml)[:devices]]
            self._begin()
        except pynvml.NVMLError:
            self._handles = []

    def read(self) -> dict[str, Any]:
        """`joules` of each GPU, their `watts` on average and the `limit_watts` that they may draw together; empty where
        nothing is known."""
        if not self._handles:
            return {}
        before, began_s = self._joules, self._at_s
        self._begin()
        joules = [now - then for now, then in zip(self._joules, before, strict=True)]
        limit_mw = sum(self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle) for handle in self._handles)
        watts = sum(joules) / (self._at_s - began_s)
        return {"joules": joules, "watts": watts, "limit_watts": limit_mw / 1e3}

    def _begin(self) -> None:
        self._joules = [self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3 for handle in self._handles]
        self._at_s = time.perf_counter()


def _visible(nvml: Any) -> list[int | str]:
    """GPUs as CUDA orders them here: numbers, or names that NVIDIA gave them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(range(nvml.nvmlDeviceGetCount()))
    return [int(word) if word.strip().isdigit() else word.strip() for word in named.split(",") if word.strip()]


def _handle(nvml: Any, which: int | str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(which) if isinstance(which, int) else nvml.nvmlDeviceGetHandleByUUID(which)
