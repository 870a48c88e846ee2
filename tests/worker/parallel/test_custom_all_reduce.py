"""Sums through memory that ranks share: who uses them, and that a decoder with them says the same."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kernels.comm import cuda_ipc
from kernels.ops.norm import add_rms_norm
from tests.worker.conftest import DELTA_NETS, make_tiny, together
from tests.worker.covering import SHARDED
from tests.worker.references import Answer, answers, assert_same, batch, generated, settings
from worker.executor.model_runner import ModelRunner
from worker.models.decoder import PieceBuffers
from worker.models.layer import SelfAttention
from worker.parallel import custom_all_reduce
from worker.parallel.communicator import Communicator
from worker.parallel.pipeline_stage import PipelineStage

pytest.importorskip("triton")
from kernels.comm import all_reduce

CPU = torch.device("cpu")


class Sums:
    """As `kernels.comm.all_reduce.CustomAllReduce`, through gloo. A part is as good as overwritten one sum after its
    own."""

    def __init__(self, group: Communicator, most: int = 1 << 30) -> None:
        self.group, self.most = group, most
        self.places: dict[int, torch.Tensor] = {}
        self.summed = -1
        self.count = 0
        self.patience = 1

    def buffer(self, rows: int, columns: int, dtype: torch.dtype, turn: int) -> torch.Tensor | None:
        if rows * columns > self.most:
            return None
        assert turn != self.summed and 0 <= turn < all_reduce.TURNS
        self.places[turn] = torch.full((rows, columns), torch.nan, dtype=dtype)
        return self.places[turn]

    def holds(self, x: torch.Tensor) -> bool:
        return any(x is place for place in self.places.values())

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        (turn,) = [turn for turn, place in self.places.items() if place is x]
        for other in self.places.keys() - {turn}:
            self.places.pop(other).fill_(torch.nan)
        self.summed, self.count = turn, self.count + 1
        out = x.clone()
        x.fill_(torch.nan)
        return Communicator.all_reduce(self.group, out)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return add_rms_norm(self.sum(x), residual, weight, eps)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_a_decoder_says_the_same(name: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(name)

    def work(group: Communicator) -> tuple[list[Answer], int, int]:
        group._custom_all_reduce = sums = Sums(group, most=300)  # type: ignore[assignment]
        runner = ModelRunner.load(folder, settings(tp=2), stage=PipelineStage.only(group))
        return generated(runner, batch()[:3]), sums.count, sum(layer.sums for layer in runner.decoder.layers)

    for got, count, sums_of_a_step in together(2, work):
        # States of delta rules carry differences of rounding from token to token: 3e-4 on some CPUs.
        assert_same(got, answers(folder)[:3], 1e-3 if name in DELTA_NETS else 1e-4)
        assert count > 6 * sums_of_a_step


class Shares:
    """Two ranks that are threads: a handle is what it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machines = ["here"] * 10
        self.wrong: set[int] = set()
        monkeypatch.setattr(cuda_ipc, "export", lambda memory: (b"\x00 \xff", memory.data_ptr()))
        monkeypatch.setattr(cuda_ipc, "open_exported", lambda handle, offset: offset)
        monkeypatch.setattr(cuda_ipc, "machine", lambda: self.machines.pop())
        monkeypatch.setattr(all_reduce, "CustomAllReduce", self._make)

    def _make(self, rank: int, memory: torch.Tensor, addresses: list[int]) -> Sums:
        assert addresses[rank] == memory.data_ptr() and len(set(addresses)) == 2
        sums = self.sums[rank]
        if rank in self.wrong:
            right = sums.sum
            sums.sum = lambda x: right(x) + 1  # type: ignore[method-assign]
        return sums

    def find(self) -> list[object]:
        store = dist.HashStore()
        self.sums: dict[int, Sums] = {}

        def work(group: Communicator) -> object:
            self.sums[group.rank] = Sums(group)
            return custom_all_reduce.find(group, store, CPU)

        return together(2, work)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Shares:
    return Shares(monkeypatch)


def test_all_use_them_where_all_can(shares: Shares) -> None:
    assert shares.find() == [shares.sums[0], shares.sums[1]]
    assert [sums.patience for sums in shares.sums.values()] == [1, 1]  # only the trial has an end


def test_none_does_where_sums_come_out_wrong(shares: Shares) -> None:
    shares.wrong = {1}
    assert shares.find() == [None, None]


def test_none_does_on_two_machines(shares: Shares) -> None:
    shares.machines = [f"machine-{i}" for i in range(10)]
    assert shares.find() == [None, None]


def test_none_does_where_a_gpu_shares_no_memory(shares: Shares, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(b"handle", 0)]

    def export(memory: torch.Tensor) -> tuple[bytes, int]:
        if not answers:
            raise OSError("cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")
        return answers.pop()

    monkeypatch.setattr(cuda_ipc, "export", export)
    assert shares.find() == [None, None]


def test_none_does_where_nccl_is_told_not_to(shares: Shares, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert shares.find() == [None, None]


@pytest.mark.parametrize("name", ["phi", "qwen3"])  # with one sum a layer, and with two
def test_pieces_take_turns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece goes on with the turn after the last one's. What attention gives does not matter here."""
    monkeypatch.setattr(SelfAttention, "rotate_and_store", lambda *_: None)
    folder, layers = make_tiny(name, tmp_path, layers=4), 4

    def work(group: Communicator) -> int:
        decoder = ModelRunner.load(folder, settings(tp=2), stage=PipelineStage.only(group)).decoder
        config, n = decoder.config, 3
        group._custom_all_reduce = sums = Sums(group)
        states = torch.zeros(n, config.num_heads, config.head_dim)
        ids, hidden = torch.arange(n), torch.zeros(n, config.hidden_size)
        buffers = PieceBuffers(ids, ids, [], [], [], hidden, states, states, torch.zeros(n, 0))
        with torch.inference_mode():
            for index in range(config.num_layers):
                decoder.piece(index, buffers)
            decoder.finish(hidden, decoder.gated(buffers))
        return sums.count

    assert together(2, work) == [1 + layers * (1 if name == "phi" else 2)] * 2
