"""Products with weights that never change, against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from kernels.linear.linear import Linear, padded_rows
from tests.kernels.device import DEVICE, ON_GPU


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_adding_a_product(dtype: torch.dtype, tolerance: float, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, residual = (
        torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in ((5, 64), (48, 64), (48,), (5, 48))
    )
    linear = Linear(weight.clone(), bias if has_bias else None)
    wanted = residual.double() + F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    linear.add_to(residual, x)
    error = (residual.double() - wanted).norm() / wanted.norm()
    assert error < tolerance, float(error)


@pytest.mark.skipif(ON_GPU, reason="of CPUs")
def test_a_cpu_that_cannot_pack_sixteen_bits_multiplies_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    linear = Linear(weight)
    assert not linear.is_packed
    torch.testing.assert_close(linear(x), F.linear(x, weight))


@pytest.mark.skipif(ON_GPU, reason="of CPUs")
def test_few_numbers_of_rows_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps code for each number for good."""
    most = 8192
    wanted = {padded_rows(rows) for rows in range(1, most + 1)}
    assert len(wanted) == 32 + 8 * 8
    assert all(rows <= padded_rows(rows) <= 1.125 * rows for rows in range(1, most + 1))
    sizes = set()
    product = torch.ops.mkldnn._linear_pointwise

    def observed(x: torch.Tensor, *others: object) -> torch.Tensor:
        sizes.add(len(x))
        result: torch.Tensor = product(x, *others)
        return result

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", observed)
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((8, 16), (8,), (300, 16)))
    linear = Linear(weight.clone(), bias)
    if not linear.is_packed:
        pytest.skip("this PyTorch packs no weights")
    for rows in range(1, len(x) + 1):
        result = linear(x[:rows])
        assert result.is_contiguous()
        torch.testing.assert_close(result, F.linear(x[:rows], weight, bias))
    assert sizes == {rows for rows in wanted if rows <= 320}
