"""Experts with shared ones among them, and for one token."""

from pathlib import Path

import pytest
import torch

from kernels.experts.choice import Routing
from kernels.experts.experts import Experts
from kernels.experts.routing import route
from kernels.experts.tiles import EACH_PAIR, ExpertTiles, ProductTile, TunedTiles
from kernels.linear.linear import Linear
from kernels.ops.activation import relu2, silu_and_mul
from tests.worker.conftest import make_tiny
from worker.config import WorkerConfig
from worker.executor.model_runner import ModelRunner
from worker.models.decoder import Decoder
from worker.models.experts import ExpertMLP, SharedExperts, with_shared
from worker.models.residual_stream import OneTokenStream, ResidualStream

HIDDEN, SIZE, COUNT = 6, 4, 5


def random(*shape: int) -> torch.Tensor:
    """Float64, for which a CPU keeps weights as they are."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize(("gated", "activation"), [(False, silu_and_mul), (True, silu_and_mul), (False, relu2)])
def test_shared_experts_among_the_others(gated: bool, activation) -> None:
    rows = SIZE if activation is relu2 else 2 * SIZE
    gate_up, down, x = random(COUNT, rows, HIDDEN), random(COUNT, HIDDEN, SIZE), random(7, HIDDEN)
    shared = SharedExperts(
        Linear(random(3 * rows, HIDDEN)), Linear(random(HIDDEN, 3 * SIZE)), activation, random(1, HIDDEN)
    )
    if not gated:
        shared = SharedExperts(shared.gate_up, shared.down, activation)
    router = Linear(random(COUNT, HIDDEN))
    chosen, shares = route(router(x), Routing(2))
    wanted = Experts(gate_up, down, activation)(x, chosen, shares) + shared(x)
    whole = with_shared(gate_up, down, shared, router)
    assert whole is not None and len(whole.gate_up) == COUNT + 3
    chosen, shares = route(whole.router(x), Routing(2), None, 3, gated)
    got = Experts(whole.gate_up, whole.down, activation)(x, chosen, shares)
    torch.testing.assert_close(got, wanted)


def test_shared_experts_of_another_size() -> None:
    shared = SharedExperts(Linear(random(2 * SIZE + 4, HIDDEN)), Linear(random(HIDDEN, SIZE + 2)), silu_and_mul)
    router = Linear(random(COUNT, HIDDEN))
    assert with_shared(random(COUNT, 2 * SIZE, HIDDEN), random(COUNT, HIDDEN, SIZE), shared, router) is None


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "qwen2_moe"])
def test_one_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a larger step: in that of one token, norm and residual are part of the experts' kernels."""
    monkeypatch.setattr(Decoder, "autotune_experts", lambda *_: None)
    sizes = {"shared_expert_intermediate_size": 40} if name == "qwen2_moe" else {}
    folder = make_tiny(name, tmp_path, layers=3, **sizes)
    runner = ModelRunner.load(folder, WorkerConfig(device="cuda", dtype="bfloat16", page_size=4, kv_tokens=512))
    mlps = [layer.mlp for layer in runner.decoder.layers if isinstance(layer.mlp, ExpertMLP)]
    alone = ExpertTiles(EACH_PAIR, ProductTile(4, 32, 4, 1), ProductTile(8, 16, 4, 1))
    for mlp in mlps:
        mlp.experts.tuned = TunedTiles({3: alone})
    assert mlps and all(mlp.shared is None and mlp._is_fused_for_one for mlp in mlps)
    for mlp in mlps:
        x = torch.randn(1, runner.model_config.hidden_size, device="cuda").bfloat16()
        one = OneTokenStream(x.clone(), runner.communicator, 1e-5)
        many = ResidualStream(x.repeat(3, 1), runner.communicator, 1e-5)
        mlp.forward(one)
        mlp.forward(many)
        torch.testing.assert_close(one.complete()[0], many.complete()[0], atol=0.05, rtol=0.02)
    runner.close()
