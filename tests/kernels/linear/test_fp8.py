"""Products in 8 bits against the same rounding in plain arithmetic."""

import pytest
import torch

from tests.kernels.device import DEVICE, ON_GPU

pytest.importorskip("triton")

from kernels.linear import fp8_quantize
from kernels.linear.fp8_linear import (
    GROUP,
    LARGEST,
    Fp8Linear,
    Fp8Weight,
    by_column,
    multiplies,
    quantize,
    quantize_groups,
)
from kernels.linear.gemv import gated_gemv, gemv


def random(*shape: int) -> torch.Tensor:
    """Rows of very different sizes, the second all zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = 10.0 ** torch.randint(-3, 3, (shape[0], 1), generator=generator)
    x = torch.randn(*shape, generator=generator) * sizes
    if len(x) > 1:
        x[1] = 0
    return x


def whole(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.double() * by_column(scales, values.shape[1]).double()


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def test_rows_are_rounded_as_well_as_8_bits_can() -> None:
    x = random(6, 300)
    values, scales = quantize(x)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (6, 1)
    most = x.abs().amax(1, keepdim=True)
    # Three bits after the first; of the smallest, steps of 2**-9.
    assert ((whole(values, scales) - x).abs() <= x.abs() * (1 / 16 + 1e-6) + most / LARGEST * 2**-10).all()
    assert (values.float().abs().amax(1)[most[:, 0] > 0] == LARGEST).all() and not values[1].float().any()


@pytest.mark.parametrize("size", [48, 300, 9000])
def test_rows_are_rounded_by_a_kernel(size: int) -> None:
    """The interpreter rounds badly: it gets values that need no rounding."""
    values = quantize(random(3, size).sign() * 2.0 ** torch.randint(-6, 9, (3, size)))[0]
    values[:, 7] = LARGEST
    x = (values.float() * torch.tensor([[0.25], [1.0], [8.0]])).to(DEVICE, torch.float16)
    got, scales = fp8_quantize.quantize(x)
    assert scales[:, 0].tolist() == [0.25, 1.0, 8.0]
    assert torch.equal(got.float().cpu(), values.float())
    assert not fp8_quantize.quantize(torch.zeros(2, 16, device=DEVICE))[0].float().any()


@pytest.mark.gpu  # the interpreter rounds badly
def test_a_kernel_rounds_as_torch_does() -> None:
    x = random(64, 4096)
    (got, scales), (values, wanted) = fp8_quantize.quantize(x.to(DEVICE)), quantize(x)
    torch.testing.assert_close(scales.cpu(), wanted, rtol=1e-6, atol=0)
    assert (got.cpu().float() != values.float()).float().mean() < 1e-3  # division is a little different


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("n", [1, 5])
def test_products(n: int, has_bias: bool) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, weight, bias = (part.to(dtype) for part in (random(n, 96), random(80, 96), random(1, 80)[0]))
    rounded = Fp8Weight(*(part.to(DEVICE) for part in quantize(weight)))
    linear = Fp8Linear(rounded, bias.to(DEVICE) if has_bias else None, dtype)
    wanted = whole(*quantize(x)) @ whole(*quantize(weight)).T + (bias.double() if has_bias else 0)
    got = linear(x.to(DEVICE))
    assert got.dtype == dtype and error(got.cpu(), wanted) < (6e-3 if ON_GPU else 1e-6)
    out = torch.empty_like(got)
    assert linear(x.to(DEVICE), out) is out and torch.equal(out, got)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert 1e-3 < error(got.cpu(), exact) < 0.06


@pytest.mark.skipif(ON_GPU, reason="there it is the product itself")
def test_products_are_those_of_the_operator_that_gpus_have() -> None:
    x, weight = random(5, 96), random(80, 96)
    (values, scales), rounded = quantize(x), Fp8Weight(*quantize(weight))
    theirs = torch._scaled_mm(
        values, rounded.values.t(), scale_a=scales, scale_b=rounded.scales.t(), out_dtype=torch.float32
    )
    torch.testing.assert_close(Fp8Linear(rounded, None, torch.float32)(x), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu  # any size will do on a CPU
def test_sizes_that_a_gpu_does_not_multiply() -> None:
    with pytest.raises(ValueError, match="40 by 24: leave quantization out"):
        Fp8Linear(Fp8Weight(*quantize(torch.ones(40, 24, device=DEVICE))), None, torch.bfloat16)


# The interpreter has no bfloat16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])])
@pytest.mark.parametrize("columns", [96, 1500])
def test_products_with_one_vector(columns: int, dtype: torch.dtype) -> None:
    """Only the weight is rounded."""
    x, weight, bias = (part.to(DEVICE, dtype) for part in (random(1, columns), random(50, columns), random(1, 50)[0]))
    norm = random(1, columns)[0].to(DEVICE, dtype)
    values, scales = quantize(weight)
    wanted = x.double() @ whole(values, scales).T + bias.double()
    out = torch.empty(1, 50, device=DEVICE)
    assert error(gemv(x, values, bias, scales, out=out), wanted) < 1e-5
    normed = torch.nn.functional.rms_norm(x.double(), (columns,), norm.double(), 1e-5)
    gate, up = (normed @ whole(values, scales).T).chunk(2, dim=-1)
    got = gated_gemv(x, values, None, scales, norm=norm, eps=1e-5)
    assert (
        error(got, torch.nn.functional.silu(gate) * up)
        < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
    )


# ---------------------------------------------------------------- scales for groups of columns


@pytest.mark.parametrize("size", [128, 300, 4200])
def test_groups_are_rounded_by_a_kernel(size: int) -> None:
    """As in plain arithmetic, into memory in which the scales of a group are neighbours."""
    x = random(3, size).sign() * 2.0 ** torch.randint(-6, 9, (3, size))
    x[:, ::100] = LARGEST  # each group has one
    x *= 2.0 ** torch.randint(-4, 5, (3, -(-size // GROUP))).repeat_interleave(GROUP, 1)[:, :size]
    got, scales = fp8_quantize.quantize_groups(x.to(DEVICE, torch.float32), 4)
    assert got.shape == (4, size) and scales.stride() == (1, 4)
    values, wanted = quantize_groups(x)
    assert torch.equal(scales[:3].cpu(), wanted) and torch.equal(got[:3].float().cpu(), values.float())


@pytest.mark.parametrize("columns", [256, 336])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_products_with_groups(n: int, has_bias: bool, columns: int) -> None:
    if ON_GPU and not multiplies(DEVICE, (80, columns), True):
        pytest.skip("this GPU has none")
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, weight, bias = (part.to(dtype) for part in (random(n, columns), random(80, columns), random(1, 80)[0]))
    own = Fp8Weight(*quantize_groups(weight))
    rounded = Fp8Weight(*(part.contiguous().to(DEVICE) for part in own))
    linear = Fp8Linear(rounded, bias.to(DEVICE) if has_bias else None, dtype)
    wanted = whole(*quantize_groups(x)) @ whole(*own).T + (bias.double() if has_bias else 0)
    got = linear(x.to(DEVICE))
    assert got.dtype == dtype and error(got.cpu(), wanted) < (6e-3 if ON_GPU else 1e-6)
    out = torch.empty_like(got)
    assert linear(x.to(DEVICE), out) is out and torch.equal(out, got)


@pytest.mark.parametrize("columns", [256, 1500])
def test_products_with_one_vector_and_groups(columns: int) -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, weight, bias = (part.to(DEVICE, dtype) for part in (random(1, columns), random(50, columns), random(1, 50)[0]))
    weight *= (
        2.0 ** torch.randint(-4, 5, (50, -(-columns // GROUP)), device=DEVICE).repeat_interleave(GROUP, 1)[:, :columns]
    )
    linear = Fp8Linear(Fp8Weight(*(part.contiguous() for part in quantize_groups(weight))), None, dtype)
    exact = whole(linear.weight, linear.scales)
    out = torch.empty(1, 50, device=DEVICE)
    assert error(gemv(x, linear.weight, bias, linear.scales, out=out), x.double() @ exact.T + bias.double()) < 1e-5
    gate, up = (x.double() @ exact.T).chunk(2, dim=-1)
    got = gated_gemv(x, linear.weight, None, linear.scales)
    assert error(got, torch.nn.functional.silu(gate) * up) < (6e-3 if ON_GPU else 1e-5)


def test_devices_that_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert multiplies(torch.device("cpu"), (3, 5), True)
    assert not multiplies(gpu, (40, 128), False)
    for capability, cuda, rows, groups in [
        ((8, 0), "13.0", False, False),
        ((8, 9), "13.0", True, False),
        ((9, 0), "12.8", True, False),
        ((9, 0), "12.9", True, True),
        ((10, 0), "13.0", True, False),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, own=capability: own)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert multiplies(gpu, (48, 128), False) is rows and multiplies(gpu, (48, 128), True) is groups
