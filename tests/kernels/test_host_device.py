"""What comes to the device is what was sent, whatever the dtypes and lengths."""

import numpy as np
import pytest
import torch

from kernels.host_device import GraphInputs, all_to_device, reserve_pinned, to_device, to_host

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ARRAYS = [
    np.arange(7, dtype=np.int32),
    np.zeros(0, dtype=np.int64),
    np.array([[1.5, -2.0], [np.inf, 0.0]], dtype=np.float32),
    np.array([True, False, True]),
    np.array([2**40, -1], dtype=np.int64),
]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_arrive_alone_and_together(device):
    place = torch.device(device)
    for array, together in zip(ARRAYS, all_to_device(ARRAYS, place), strict=True):
        for tensor in (together, to_device(array, place)):
            assert tensor.device.type == device
            back = to_host(tensor)
            if device == "cuda":
                torch.cuda.synchronize()
            assert back.numpy().dtype == array.dtype
            np.testing.assert_array_equal(back.numpy(), array)


@pytest.mark.parametrize("device", DEVICES)
def test_static_arrays_keep_their_addresses_and_are_cleared_beyond_what_is_given(device):
    static = GraphInputs(torch.device(device), {"ids": (torch.int64, 5), "pages": (torch.int32, 9)})
    address = static["ids"].data_ptr()
    static.fill({"ids": np.arange(1, 6), "pages": np.arange(1, 10, dtype=np.int32)})
    static.fill({"ids": np.array([8, 9]), "pages": np.array([7], dtype=np.int32)})
    assert static["ids"].tolist() == [8, 9, 0, 0, 0]
    assert static["pages"].tolist() == [7, *range(2, 10)]
    assert static["ids"].data_ptr() == address


def test_each_buffer_of_static_arrays_is_cleared_beyond_what_is_given_whatever_it_held_before():
    static = GraphInputs(torch.device("cpu"), {"ids": (torch.int64, 6), "pages": (torch.int32, 1)})
    for turn, length in enumerate([6, 1, 4, 2, 3, 6, 0, 5, 1, 0], start=1):
        static.fill({"ids": np.full(length, turn), "pages": np.zeros(1, dtype=np.int32)})
        assert static["ids"].tolist() == [turn] * length + [0] * (6 - length)


def test_pinned_memory_of_every_size_is_kept(monkeypatch):
    asked = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, pin_memory, **more: asked.append(size) or empty(size, **more))
    reserve_pinned(5000, 3)
    assert sorted(asked) == [512] * 3 + [1024] * 3 + [2048] * 3 + [4096] * 3 + [8192] * 3
    asked.clear()
    reserve_pinned(4096, 1)
    assert max(asked) == 4096
