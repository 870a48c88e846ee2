"""Energy that this machine's GPUs use. If power rather than time is the limit, bubbles cost little throughput: stages
that wait less compute more slowly."""

import os
import time
from typing import Any


class Energy:
    """Meter of the energy used since its construction or the last `read`, by NVML's counters. It measures nothing where
    NVML is not available."""

    def __init__(self, devices: int) -> None:
        """Measures the first `devices` GPUs that are visible to CUDA in this process."""
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
        """Returns the energy since the last `read`. Empty if nothing is measured.

        | key | meaning |
        | --- | --- |
        | `joules` | energy of each GPU |
        | `watts` | mean power of all GPUs together |
        | `limit_watts` | power limit of all GPUs together |
        """
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
    """The visible GPUs in CUDA's order: indices or UUIDs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(range(nvml.nvmlDeviceGetCount()))
    return [int(word) if word.strip().isdigit() else word.strip() for word in named.split(",") if word.strip()]


def _handle(nvml: Any, which: int | str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(which) if isinstance(which, int) else nvml.nvmlDeviceGetHandleByUUID(which)
