"""Masks of grammars on a device."""

from collections.abc import Sequence

import pytest
import torch

from worker.sampling import token_bitmask
from worker.structured_output import GrammarThreads


@pytest.mark.gpu  # which computes later
def test_steps_under_way_do_not_write_into_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that they get may have been another's, who has yet to write into it."""

    def fill(
        states: Sequence[object], bitmask: torch.Tensor, rows: Sequence[int], threads: object
    ) -> dict[int, object]:
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
    own = token_bitmask.TokenBitmask(64, 4096 * 32, device, GrammarThreads())
    own.fill([], [])
    assert own.on_device(64).eq(1).all()
