"""Latent attention against its definition: keys and values of all heads, made of the latents."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.attention.cpu.numba_backend import NumbaAttention
from kernels.attention.interface import AttentionBackend, AttentionShape, LatentHeads
from kernels.attention.latent import TorchLatentAttention, is_plain, operations
from kernels.attention.torch_backend import TorchAttention
from tests.kernels.attention.batches import MIXED, random_batch
from tests.kernels.attention.latents import LAYERS, Definition, latent_shape, random_weights

HEADS = LatentHeads(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)


def check(
    make: Callable[[torch.Tensor, AttentionShape], AttentionBackend],
    chunks: list[tuple[int, int]],
    page_size: int,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-6,
) -> None:
    batch = random_batch(np.random.default_rng(len(chunks)), chunks, page_size)
    torch.manual_seed(1)
    num_pages, shape = sum(-(-(start + length) // page_size) for start, length in chunks), latent_shape(HEADS, 3)
    weights = [weight.to(dtype) for weight in random_weights(HEADS, 3)]
    kv = torch.randn(LAYERS, 1, num_pages, 1, page_size, HEADS.row).to(dtype)
    tested = TorchLatentAttention(kv, shape, weights, make)
    tested.plan(batch)
    for layer in range(LAYERS):
        q, rows = torch.randn(batch.num_tokens, 3, HEADS.query).to(dtype), torch.randn(batch.num_tokens, 1, HEADS.row)
        got = tested.run(layer, q, rows.to(dtype), rows.to(dtype))
        assert torch.equal(kv[layer].flatten(0, 3)[tested.slots], rows[:, 0].to(dtype))
        assert got.shape == (batch.num_tokens, 3, HEADS.v_head_dim) and got.dtype == dtype
        wanted = Definition(kv, shape, weights).attend(layer, batch, q)
        torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("make", [TorchAttention, NumbaAttention])
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_batch(make: Callable, page_size: int) -> None:
    check(make, MIXED, page_size)


@pytest.mark.parametrize("chunks", [[(5, 1), (0, 1), (90, 1)], [(0, 40), (0, 2)], [(200, 2)]], ids=str)
def test_one_way_alone(chunks: list[tuple[int, int]]) -> None:
    check(NumbaAttention, chunks, 4)


def test_in_bfloat16() -> None:
    check(NumbaAttention, MIXED, 16, torch.bfloat16, 0.05)


DEEPSEEK = LatentHeads(512, 128, 64, 128)


@pytest.mark.parametrize(
    ("start", "length", "plain"),
    [
        (0, 1, False),  # decodes are one batch
        (4000, 1, False),
        (0, 2, True),  # each way makes a product for each token, and pairs cost less
        (0, 4000, True),
        (4000, 100, False),  # 4,000 tokens would be expanded for 100 queries
        (4000, 400, True),
        (100_000, 160, False),
        (100_000, 180, True),  # each key's products cost as much as 171 pairs save
    ],
)
def test_the_way_with_fewer_operations(start: int, length: int, plain: bool) -> None:
    starts, lengths = np.array([start], dtype=np.int32), np.array([length], dtype=np.int32)
    assert is_plain(DEEPSEEK, starts, lengths).tolist() == [plain]


def test_operations_of_a_prompt() -> None:
    starts, lengths = np.array([0], dtype=np.int32), np.array([3], dtype=np.int32)
    products, pairs = 3 * 2 * 512 * 256, 1 + 2 + 3
    plain, absorbed = (operations(DEEPSEEK, starts, lengths, plain=plain)[0] for plain in (True, False))
    assert plain == products + pairs * 2 * (192 + 128)
    assert absorbed == products + pairs * 2 * (576 + 512)
