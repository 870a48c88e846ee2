"""A linear layer with adapters on a GPU, in bfloat16, in both orders: against float64."""

import numpy as np
import pytest
import torch

from kernels.linear.linear import Linear
from kernels.lora.lora_weights import ColumnPart, LoraWeights
from kernels.lora.segments import Segments
from worker.models.adapted_linear import AdaptedLinear

SLOTS, RANK, IN, OUT = 3, 8, 512, 768


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("most_beside", [0, 16])
@pytest.mark.parametrize(("has_bias", "size"), [(False, 8), (False, None), (True, 8)])
def test_products_are_summed(
    has_bias: bool, size: int | None, most_beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens have no adapter, and in a graph there may be more of them than in the step."""
    monkeypatch.setattr("worker.models.adapted_linear._MAX_SIDE_TOKENS", most_beside)
    device, slots = torch.device("cuda"), np.array([2, 0, 2, -1, 1, -1])
    torch.manual_seed(0)
    base = Linear(torch.randn(OUT, IN, device=device).bfloat16(), torch.ones(OUT, device=device).bfloat16())
    if not has_bias:
        base = Linear(base.weight)
    used = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    parts = [ColumnPart(0, range(512)), ColumnPart(1, range(512, OUT))]
    weights = LoraWeights(parts, SLOTS, RANK, IN, OUT, torch.bfloat16, used)
    weights.a.normal_()
    weights.b.normal_()
    segments = Segments(16, SLOTS, device)
    layer = AdaptedLinear(base, weights, segments)
    segments.fill(slots, size)
    x = torch.randn(size or len(slots), IN, device=device).bfloat16()
    wanted = x.double() @ base.weight.double().t() + has_bias
    for token, slot in enumerate(slots.tolist()):
        for part, columns in parts if slot in {0, 2} else ():
            a = weights.a[slot, part * RANK : (part + 1) * RANK].double()
            wanted[token, columns.start : columns.stop] += weights.b[slot, columns.start : columns.stop].double() @ (
                a @ x[token].double()
            )
    out = torch.full((len(x), OUT), torch.nan, device=device, dtype=torch.bfloat16)
    for found in (layer(x), layer(x, out)):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2.0)
    if layer.adds:
        added = layer.add_to(residual := x.new_ones(len(x), OUT), x)
        assert (added is None) == (most_beside == 0)
        residual += 0 if added is None else added
        torch.testing.assert_close(residual.double(), wanted + 1, rtol=2e-2, atol=2.0)
