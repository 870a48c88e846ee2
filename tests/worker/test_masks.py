"""How masks of grammars are filled."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from worker import masks


def test_slow_masks_are_filled_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on one again when they are quick, or there are few."""
    now_s, asked, takes_s = 0.0, [], [0.0002, 0.01, 0.002, 0.0005, 0.0002]

    def fill(states: Sequence[object], bitmask: torch.Tensor, rows: Sequence[int], threads: int) -> dict[int, object]:
        nonlocal now_s
        now_s += takes_s[len(asked)]
        asked.append(threads)
        return {}

    monkeypatch.setattr(masks, "fill_masks", fill)
    monkeypatch.setattr(masks, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(masks, "_THREADS", 4)
    own = masks.Masks(2, 64, torch.device("cpu"))
    for _ in takes_s:
        assert own.fill([], []) == {}
    assert asked == [1, 1, 4, 4, 1]
