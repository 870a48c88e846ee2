"""How masks of grammars are filled."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from worker.sampling import token_bitmask


def test_slow_masks_are_filled_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on one again when they are quick, or there are few."""
    now_s, asked, takes_s = 0.0, [], [0.0002, 0.01, 0.002, 0.0005, 0.0002]

    def fill(states: Sequence[object], bitmask: torch.Tensor, rows: Sequence[int], threads: int) -> dict[int, object]:
        nonlocal now_s
        now_s += takes_s[len(asked)]
        asked.append(threads)
        return {}

    monkeypatch.setattr(token_bitmask, "fill_masks", fill)
    monkeypatch.setattr(token_bitmask, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(token_bitmask, "_THREADS", 4)
    own = token_bitmask.TokenBitmask(2, 64, torch.device("cpu"))
    for _ in takes_s:
        assert own.fill([], []) == {}
    assert asked == [1, 1, 4, 4, 1]


@pytest.mark.gpu  # which computes later
def test_steps_under_way_do_not_write_into_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that they get may have been another's, who has yet to write into it."""

    def fill(states: Sequence[object], bitmask: torch.Tensor, rows: Sequence[int], threads: int) -> dict[int, object]:
        bitmask.fill_(1)
        return {}

    monkeypatch.setattr(token_bitmask, "fill_masks", fill)
    device = torch.device("cuda")
    before = torch.empty(64, 4096, dtype=torch.int32, device=device)
    work = torch.ones(8192, 8192, device=device)
    for _ in range(20):
        work = work @ work
    before.fill_(-1)
    del before
    own = token_bitmask.TokenBitmask(64, 4096 * 32, device)
    own.fill([], [])
    assert own.on_device(64).eq(1).all()
