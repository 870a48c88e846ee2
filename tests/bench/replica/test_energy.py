"""What is read of NVML's counters."""

import sys
from types import SimpleNamespace

import pytest

from bench.replica.energy import Energy


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """Three GPUs whose counters, in millijoules, stand at 1,000 times their number."""
    counters = {"0": 0, "1": 1000, "GPU-2": 2000}
    made = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda number: "GPU-2" if number == 2 else str(number),
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: counters[handle],
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        counters=counters,
    )
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def test_what_has_been_drawn_since_the_last_reading(nvml, monkeypatch):
    at_s = iter([10.0, 12.0, 13.0])
    monkeypatch.setattr("bench.replica.energy.time.perf_counter", lambda: next(at_s))
    energy = Energy(2)
    nvml.counters.update({"0": 600_000, "1": 801_000})
    assert energy.read() == {"joules": [600.0, 800.0], "watts": 700.0, "limit_watts": 1400.0}
    nvml.counters["1"] += 5000
    assert energy.read() == {"joules": [0.0, 5.0], "watts": 5.0, "limit_watts": 1400.0}


@pytest.mark.parametrize(("visible", "joules"), [("2,0", [1.0, 0.0]), ("GPU-2", [1.0]), ("", None)])
def test_gpus_are_those_that_a_process_would_see(nvml, monkeypatch, visible, joules):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    energy = Energy(4)
    nvml.counters["GPU-2"] += 1000
    assert energy.read().get("joules") == joules


def test_without_counters_nothing_is_said(nvml, monkeypatch):
    def refuse(handle):
        raise NVMLError("not supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", refuse)
    assert Energy(1).read() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Energy(1).read() == {}
