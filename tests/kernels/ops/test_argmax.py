"""The likeliest tokens against PyTorch's, on random logits."""

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE, ON_GPU

pytest.importorskip("triton")

from kernels.ops.argmax import greedy_argmax, greedy_argmax_into

SIZES = [(1, 5000), (3, 97), (7, 2048), (40, 4099), *([(1, 151_936), (256, 128_256)] if ON_GPU else [])]


def random(n: int, vocab: int) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(n)).to(DEVICE)


@pytest.mark.parametrize(("n", "vocab"), SIZES)
@pytest.mark.slow
def test_the_largest_of_each_row(n: int, vocab: int) -> None:
    logits = random(n, vocab)
    assert torch.equal(greedy_argmax(logits), logits.argmax(1))
    rows = torch.arange(n - 1, -1, -2, device=DEVICE)
    assert torch.equal(greedy_argmax(logits, rows), logits[rows].argmax(1))


def test_the_first_of_equals() -> None:
    logits = random(3, 9000)
    logits[0] = 0.25
    logits[1, [4, 77, 8191, 8999]] = 9.0
    logits[2, [8998, 8999]] = 9.0
    assert greedy_argmax(logits).tolist() == [0, 4, 8998]


@pytest.mark.parametrize("place", [0, 3000, 6999])
def test_rows_that_are_no_distribution(place: int) -> None:
    logits = random(5, 7000)
    logits[0, place] = torch.nan
    logits[1, place] = torch.inf
    logits[2, :] = -torch.inf
    logits[3, place] = -torch.inf  # a token that cannot come: the others can
    found = greedy_argmax(logits).tolist()
    assert found[:3] == [-1] * 3 and found[3:] == logits[3:].argmax(1).tolist()


def test_only_what_a_mask_allows() -> None:
    n, vocab = 4, 4100
    logits, rows = random(6, vocab), torch.tensor([5, 0, 3, 1], device=DEVICE)
    allowed = np.random.default_rng(0).random((n, -(-vocab // 32) * 32)) < 0.01
    allowed[2] = False  # nothing
    allowed[3] = True
    masks = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32)).to(DEVICE)
    wanted = logits[rows].masked_fill(~torch.from_numpy(allowed[:, :vocab]).to(DEVICE), -torch.inf).argmax(1)
    wanted[2] = -1
    assert torch.equal(greedy_argmax(logits, rows, masks), wanted)


def test_slots_get_their_last_tokens() -> None:
    logits = random(4, 3000)
    logits[2, 5] = torch.nan
    out, last_tokens = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.full((9,), -7, device=DEVICE)
    greedy_argmax_into(logits, out, torch.tensor([8, 0, 3, 5], device=DEVICE), last_tokens)
    wanted = logits.argmax(1).tolist()
    assert out.tolist() == [wanted[0], wanted[1], -1, wanted[3]]
    assert last_tokens.tolist() == [wanted[1], -7, -7, 0, -7, wanted[3], -7, -7, wanted[0]]
