"""The fused operators against their definitions, on random inputs."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kernels.ops.rotary import Rope, rotate
from tests.kernels.covering import covering
from tests.kernels.device import DEVICE
from tests.kernels.ops.comparison import TOLERANCES, close, random

pytest.importorskip("triton")

from kernels.linear import gemv as gemv_module
from kernels.linear.gemv import gated_gemv, gemv
from kernels.ops import fused


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("size", [64, 576, 1030])
def test_norms(size: int, dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = (
        random(5, size, dtype=dtype),
        random(5, size + 1, dtype=dtype)[:, 1:].contiguous(),
        random(size),
    )
    wanted = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    close(fused.rms_norm(x, weight, 1e-5), wanted, tolerance)
    total = (x.float() + residual.float()).to(dtype)
    normed = fused.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    close(normed, F.rms_norm(total.double(), (size,), weight.double(), 1e-5), tolerance)


def test_norm_of_some_rows() -> None:
    x, weight = random(6, 2 * 64), random(64)
    rows = x[:, 64:]
    close(fused.rms_norm(rows, weight, 1e-6), F.rms_norm(rows.double(), (64,), weight.double(), 1e-6), 2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("size", [48, 1500])
def test_activations(size: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = random(3, 2 * size, dtype=dtype)
    for added in (None, random(3, 2 * size + 1, dtype=dtype)[:, 1:].contiguous()):
        gate, up = (gate_up.double() + (0 if added is None else added)).chunk(2, dim=-1)
        close(fused.silu_and_mul(gate_up, added), F.silu(gate) * up, tolerance)
        close(fused.gelu_tanh_and_mul(gate_up, added), F.gelu(gate, approximate="tanh") * up, tolerance)
        both = torch.cat((gate, up), 1)
        close(fused.relu2(gate_up, added), F.relu(both).square(), tolerance)
        close(fused.gelu_tanh(gate_up, added), F.gelu(both, approximate="tanh"), tolerance)


@covering(
    {
        "heads, kv_heads, head_dim": [(9, 3, 64), (8, 2, 128), (4, 1, 20)],
        "has_norms": [False, True],
        "dtype, tolerance": TOLERANCES,
    }
)
def test_rotate_and_store(
    heads: int, kv_heads: int, head_dim: int, has_norms: bool, dtype: torch.dtype, tolerance: float
) -> None:
    page_size, num_pages, context = 4, 10, 512
    rope = Rope(head_dim, 1e4)
    gates = heads * head_dim if has_norms else 0  # after the values, and not read
    size = (heads + 2 * kv_heads) * head_dim + gates
    qkv = random(6, size + 16, dtype=dtype)[:, :size]
    positions = torch.tensor([0, 1, 77, 500, 511, 3], device=DEVICE)
    places = torch.tensor([(0, 0), (0, 1), (3, 3), (9, 2), (5, 0), (7, 1)], device=DEVICE)
    rows = places[:, 0] * kv_heads * page_size + places[:, 1]
    pages = torch.zeros(2, num_pages, kv_heads, page_size, head_dim, device=DEVICE, dtype=dtype)
    norms = (random(head_dim), random(head_dim + 1)[1:].contiguous()) if has_norms else (None, None)
    got = fused.rotate_and_store(qkv, heads, rope.table(context, DEVICE), positions, rows, pages, *norms, 1e-6)
    read = qkv.double().view(6, -1, head_dim)[:, : heads + 2 * kv_heads]
    q, k, v = read.split((heads, kv_heads, kv_heads), dim=1)
    if norms[0] is not None and norms[1] is not None:
        q = F.rms_norm(q, (head_dim,), norms[0].double(), 1e-6)
        k = F.rms_norm(k, (head_dim,), norms[1].double(), 1e-6)
    angles = [part.double() for part in rope.angles(positions, torch.float32)]
    close(got, rotate(q, *angles), tolerance)
    close(pages[0, places[:, 0], :, places[:, 1]], rotate(k, *angles), tolerance)
    assert torch.equal(pages[1, places[:, 0], :, places[:, 1]].double(), v)
    written = torch.zeros(num_pages, page_size, dtype=torch.bool, device=DEVICE)
    written[places[:, 0], places[:, 1]] = True
    assert not pages.transpose(2, 3)[:, ~written].any()


def test_rotate_queries_alone_or_normalise_values_too() -> None:
    heads, kv_heads, head_dim = 9, 2, 20
    rope, norm = Rope(head_dim, 1e4), random(head_dim)
    positions, rows = torch.tensor([3, 60], device=DEVICE), torch.tensor([1, 10], device=DEVICE)
    qkv = random(2, (heads + 2 * kv_heads) * head_dim)
    q, k, v = qkv.double().view(2, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    angles = [part.double() for part in rope.angles(positions, torch.float32)]
    wanted = rotate(F.rms_norm(q, (head_dim,), norm.double(), 1e-6), *angles)
    pages = torch.zeros(2, 2, kv_heads, 4, head_dim, device=DEVICE)
    table = rope.table(64, DEVICE)
    got = fused.rotate_and_store(qkv, heads, table, positions, rows, pages, norm, norm, 1e-6, normalises_values=True)
    close(got, wanted, 1e-5)
    stored = pages.flatten(1, 3)[:, (rows[:, None] + torch.arange(kv_heads, device=DEVICE) * 4).flatten()]
    close(stored[0].view_as(k), rotate(F.rms_norm(k, (head_dim,), norm.double(), 1e-6), *angles), 1e-5)
    close(stored[1].view_as(v), F.rms_norm(v, (head_dim,), None, 1e-6), 1e-5)
    queries = qkv[:, : heads * head_dim].contiguous()
    untouched = torch.zeros_like(pages)
    got = fused.rotate_and_store(queries, heads, table, positions, rows, untouched, norm, None, 1e-6, has_kv=False)
    close(got, wanted, 1e-5)
    assert not untouched.any()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("rows", "columns", "read_as"), [(50, 64, 50), (37, 1500, 701), (75, 520, 4096)])
def test_gemv(
    rows: int, columns: int, read_as: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tiles of a weight of `read_as` rows: so many take the interpreter half a minute."""
    tile = gemv_module._tile
    monkeypatch.setattr(gemv_module, "_tile", lambda rows, *others: tile(read_as, *others))
    x, weight, bias = random(1, columns, dtype=dtype), random(rows, columns, dtype=dtype), random(rows, dtype=dtype)
    norm, residual = random(columns, dtype=dtype), random(1, rows, dtype=dtype)
    close(gemv(x, weight), x.double() @ weight.double().T, tolerance)
    normed = F.rms_norm(x.double(), (columns,), norm.double(), 1e-5)
    wanted = normed @ weight.double().T + bias.double() + residual.double()
    close(gemv(x, weight, bias, norm=norm, eps=1e-5, residual=residual), wanted, tolerance)
    out = torch.empty(1, rows, device=DEVICE)
    assert gemv(x, weight, out=out) is out
    close(out, x.double() @ weight.double().T, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(50, 64), (37, 1500)])
def test_gated_gemv(rows: int, columns: int, gelu: bool) -> None:
    x, weight, bias, norm = random(1, columns), random(2 * rows, columns), random(2 * rows), random(columns)
    gate, up = (F.rms_norm(x.double(), (columns,), norm.double(), 1e-5) @ weight.double().T + bias).chunk(2, dim=-1)
    wanted = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    close(gated_gemv(x, weight, bias, norm=norm, eps=1e-5, gelu=gelu), wanted, 2e-6)


def chain(x: torch.Tensor, weights: list[torch.Tensor], after_each: Callable[[], None]) -> torch.Tensor:
    """Kernels that each read what the one before wrote, with and without a plain one between; memory of earlier ones is
    taken again."""
    square, wide, norm = weights
    residual = x.clone()
    for _ in range(20):
        if len(x) == 1:
            steps: list[Callable[[torch.Tensor], torch.Tensor]] = [
                lambda y: gated_gemv(y, wide, norm=norm, eps=1e-5),
                lambda y: gemv(y, square, residual=residual),
                lambda y: fused.add_rms_norm(y, residual, norm, 1e-5),
            ]
        else:
            steps = [
                lambda y: fused.silu_and_mul(F.linear(y, wide)),
                lambda y: fused.rms_norm(y, norm, 1e-5),
                lambda y: fused.add_rms_norm(y, residual, norm, 1e-5),
            ]
        for step in steps:
            x = step(x)
            after_each()
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 200])
def test_kernels_wait_for_the_ones_before_them(n: int) -> None:
    """A graph, in which each starts as early as it may, gives what they give one at a time."""
    size, dtype = 2048, torch.bfloat16
    weights = [
        random(size, size, dtype=dtype) / 45,
        random(2 * size, size, dtype=dtype) / 45,
        random(size, dtype=dtype),
    ]
    x = random(n, size, dtype=dtype)
    wanted = chain(x, weights, torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x, weights, lambda: None)
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, wanted)
