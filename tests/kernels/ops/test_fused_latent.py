"""The fused operators of latent attention against their definitions, on random inputs."""

import pytest
import torch
import torch.nn.functional as F

from kernels.attention.interface import LatentHeads
from kernels.ops.rotary import Rope, rotate

pytest.importorskip("triton")

from kernels.ops.fused_latent import rotate_and_store
from tests.kernels.device import DEVICE
from tests.kernels.ops.comparison import TOLERANCES, close, random


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("num_heads", "heads"), [(9, LatentHeads(512, 128, 64, 128)), (4, LatentHeads(24, 12, 8, 10))])
def test_rotate_and_store(num_heads: int, heads: LatentHeads, dtype: torch.dtype, tolerance: float) -> None:
    page_size, num_pages, context, nope = 4, 10, 512, heads.qk_nope_head_dim
    rope = Rope(heads.qk_rope_head_dim, 1e4)
    qkv = random(5, num_heads * heads.query + heads.row, dtype=dtype)
    q, rows = qkv.split((num_heads * heads.query, heads.row), dim=1)
    positions = torch.tensor([0, 1, 77, 511, 3], device=DEVICE)
    slots = torch.tensor([0, 1, 15, 38, 20], device=DEVICE)
    pages, norm = (
        torch.zeros(1, num_pages, 1, page_size, heads.row, device=DEVICE, dtype=dtype),
        random(heads.kv_lora_rank),
    )
    got = rotate_and_store(q, rows, num_heads, rope.table(context, DEVICE), positions, slots, pages, norm, 1e-6)
    angles = rope.angles(positions, torch.float64)
    own = q.double().unflatten(1, (num_heads, heads.query))
    assert torch.equal(got[..., :nope], q.unflatten(1, (num_heads, heads.query))[..., :nope])
    close(got[..., nope:], rotate(own[..., nope:], *angles), tolerance)
    latents, keys = rows.double().split((heads.kv_lora_rank, heads.qk_rope_head_dim), dim=1)
    stored = pages.flatten(0, 3)
    close(stored[slots, : heads.kv_lora_rank], F.rms_norm(latents, norm.shape, norm.double(), 1e-6), tolerance)
    close(stored[slots, heads.kv_lora_rank :], rotate(keys[:, None], *angles)[:, 0], tolerance)
    assert stored.count_nonzero() == 5 * heads.row
