"""Tensor parallelism: the tokens of one rank whatever their number, and an end with a reason when a rank is lost."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.worker.conftest import DELTA_NETS, together
from tests.worker.covering import SHARDED
from tests.worker.references import Answer, answers, assert_same, batch, generated, prompts, settings
from worker.engine.engine import Engine
from worker.errors import RankLost
from worker.executor import launch, multi_rank
from worker.executor.executor import ForwardOutput
from worker.executor.expert_balance import EVERY_STEPS, ExpertBalance
from worker.executor.model_runner import ModelRunner
from worker.executor.multi_rank import Follower, MultiRankExecutor
from worker.messages import SamplingParams
from worker.models import decoder
from worker.models.config import decoder_config, read_config
from worker.models.sharding import Shard
from worker.parallel import rank_store
from worker.parallel.communicator import Communicator
from worker.parallel.meeting import Meeting
from worker.parallel.pipeline_stage import PipelineStage
from worker.parallel.rank_store import find_store, open_store
from worker.parallel.rendezvous import Rendezvous
from worker.step import Chunk, Plan

pytestmark = pytest.mark.slow

ENDS_S = 60


# ---------------------------------------------------------------- the same tokens


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("llama", 2), *((name, 3) for name in SHARDED)])
def test_every_architecture(name: str, size: int, tiny_model: Callable[[str], Path]) -> None:
    """Two ranks of each are in `tests/worker/parallel/test_custom_all_reduce.py`."""
    folder, config = tiny_model(name), settings(tp=size)
    ranks = together(
        size, lambda group: generated(ModelRunner.load(folder, config, stage=PipelineStage.only(group)), batch()[:3])
    )
    for got in ranks:
        assert_same(got, answers(folder)[:3], 1e-3 if name in DELTA_NETS else 1e-4)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3_moe", "llama4_moe", "gemma4_moe", "nemotron_h_latent_moe"]
)
def test_whole_experts_on_each_rank(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Experts in both layouts of checkpoints, with biases, shared ones, groups, and a number that two ranks cannot
    halve."""
    folder = tiny_model(name)

    def work(group: Communicator) -> tuple[list[Answer], ModelRunner]:
        runner = ModelRunner.load(folder, settings(tp=2, enable_expert_parallel=True), stage=PipelineStage.only(group))
        return generated(runner, batch()[:3]), runner

    ranks = together(2, work)
    for got, _ in ranks:
        assert_same(got, answers(folder)[:3])
    leader, other = (runner for _, runner in ranks)
    held = [runner.model_config.experts.own for runner in (leader, other)]
    assert list(held[0]) + list(held[1]) == list(range(leader.model_config.experts.count))
    assert torch.equal(leader.decoder.expert_load, other.decoder.expert_load)
    assert leader.expert_balance is not None and other.expert_balance is None
    assert sum(leader.expert_balance.tokens) > 0 and 1.0 <= leader.expert_balance.imbalance <= 2.0


def test_expert_parallelism_that_has_no_experts_is_refused(tiny_model: Callable[[str], Path]) -> None:
    whole = decoder_config(read_config(tiny_model("llama")))
    with pytest.raises(ValueError, match=r"enable_expert_parallel .*\bllama\b"):
        Shard(whole, size=2, expert_parallel=True)
    whole = decoder_config(read_config(tiny_model("mixtral")))
    with pytest.raises(ValueError, match="tp=6 "):
        Shard(replace(whole, num_heads=8), size=6, expert_parallel=True)
    with pytest.raises(ValueError, match=r"enable_expert_parallel .*\btp\b"):
        settings(enable_expert_parallel=True)


def test_balance_of_steps_that_are_looked_at() -> None:
    load = torch.tensor([[100, 0, 0], [0, 0, 0]])  # before the start, and a layer without experts
    balance = ExpertBalance(load, ranks=2)
    assert balance.imbalance is None and balance.tokens == [0, 0]
    for step in range(EVERY_STEPS + 1):
        balance.begin_step()
        load[0] += torch.tensor([3, 0, 3] if step < EVERY_STEPS else [2, 3, 3])
        balance.end_step()
    # The first rank has one expert, the second has two.
    assert balance.imbalance == pytest.approx((1.0 + 1.5) / 2)
    assert balance.tokens == [3 * EVERY_STEPS + 2, 3 * EVERY_STEPS + 6]


@pytest.mark.parametrize("name", ["llama_biased_tied", "phi", "gemma3", "nemotron_h"])
def test_many_tokens_in_two_halves(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(name)
    monkeypatch.setattr(decoder, "HALVES_FROM_TOKENS", 4)
    sums: list[int] = []
    beside = Communicator.all_reduce_async
    monkeypatch.setattr(Communicator, "all_reduce_async", lambda group, x: (sums.append(len(x)), beside(group, x))[1])
    ranks = together(
        2,
        lambda group: generated(ModelRunner.load(folder, settings(tp=2), stage=PipelineStage.only(group)), batch()[:4]),
    )
    for got in ranks:
        assert_same(got, answers(folder)[:4])
    # Chunks of one, seven, six and seven at once; what has two norms around a sum is not cut.
    assert {10, 11} <= set(sums) if name != "gemma3" else not sums


def test_all_ranks_have_the_pages_of_the_poorest(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    has = iter([640, 320, 480])
    monkeypatch.setattr(
        "worker.executor.memory_budget.cpu_tokens", lambda bytes_per_token, fraction, reserved_bytes: next(has)
    )
    folder, config = tiny_model("llama"), settings(tp=3, kv_tokens=None)
    pages = together(3, lambda group: ModelRunner.load(folder, config, stage=PipelineStage.only(group)).num_pages)
    assert pages == [20, 20, 20]


# ---------------------------------------------------------------- processes


@pytest.mark.slow
def test_an_engine_of_two_ranks_and_its_end(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One start of processes for all of it: what is said, and that closing ends them. One that is killed is in
    `tests/worker/engine/test_pipeline.py`."""
    monkeypatch.setattr(multi_rank, "GRACE_S", ENDS_S)  # no rank is killed on a machine that is busy
    folder, sampling = tiny_model("llama"), SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with closing(Engine(folder, settings())) as alone:
        expected = [finished.token_ids for finished in alone.generate(prompts(5), sampling)]
    with closing(Engine(folder, settings(tp=2, overlap=True, token_budget=16, max_running=3))) as engine:
        assert [finished.token_ids for finished in engine.generate(prompts(5), sampling)] == expected
        assert isinstance(engine.executor, MultiRankExecutor)
        leader = engine.executor
    leader.close()  # again
    assert [process.returncode for process in leader._processes] == [0]


@pytest.mark.slow
def test_a_rank_ends_with_the_process_that_started_it(tiny_model: Callable[[str], Path]) -> None:
    store, meeting = open_store()  # where it will wait in vain
    config = settings(tp=2).model_dump(mode="json")
    store.set("plans/1", "tcp://127.0.0.1:9")
    process = launch._start(launch._RankSpec(str(tiny_model("llama")), config, 1, meeting), {})
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(ENDS_S) == 1


# ---------------------------------------------------------------- ranks that fail


class Pair:
    """A leader, and a follower in a thread."""

    def __init__(self, folder: Path, follower_folder: Path | None = None) -> None:
        self.threads = ThreadPoolExecutor(1)
        self._arguments = folder, follower_folder or folder
        self.follower: Follower | None = None

    def start(self) -> MultiRankExecutor:
        self.store, meeting = open_store()  # it outlives a leader that cannot load: the follower reads why
        mine, its = self._arguments
        self.ended = self.threads.submit(self._follow, its, meeting)
        self.leader = MultiRankExecutor(mine, settings(tp=2), self.store)
        return self.leader

    def _follow(self, folder: Path, meeting: Meeting) -> None:
        self.follower = Follower(folder, settings(tp=2), 1, find_store(meeting))
        self.follower.run()


@pytest.fixture
def pair(tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**arguments: Path) -> Pair:
        pairs.append(Pair(tiny_model("llama"), **arguments))
        return pairs[-1]

    yield make
    for one in pairs:
        one.threads.shutdown()


def plan(step: int, token: int = 5) -> Plan:
    return Plan.from_chunks(step, [Chunk(0, step, [token], min(step, 1), [0] if step == 0 else [], 1)])


def test_a_rank_that_cannot_load(pair: Callable[..., Pair], tmp_path: Path) -> None:
    one = pair(follower_folder=tmp_path)
    with pytest.raises(RankLost, match=r"^rank 1: ValueError: .*model configuration"):
        one.start()
    assert isinstance(one.ended.exception(ENDS_S), ValueError)


def test_a_leader_that_cannot_load(pair: Callable[..., Pair], tmp_path: Path) -> None:
    one = pair()
    one._arguments = tmp_path, one._arguments[1]
    with pytest.raises(ValueError, match="model configuration"):
        one.start()
    assert "rank 0: ValueError" in str(one.ended.exception(ENDS_S))


def test_a_collective_that_fails_names_the_rank_that_ended_first(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> PipelineStage:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(PipelineStage, "join", cut)
    store, meeting = open_store()
    Rendezvous(store, 0, 1).fail("rank 0: ValueError: no such model")
    with pytest.raises(RankLost, match=r"^rank 0: ValueError"):
        Follower(tiny_model("llama"), settings(tp=2), 1, find_store(meeting))


def test_graphs_go_before_the_communicators_that_they_use(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []
    leave = Communicator.close
    monkeypatch.setattr(Communicator, "close", lambda group: gone.append(f"group {group.rank}") or leave(group))
    one = pair()
    leader = one.start()
    leader.forward(plan(0))  # so the follower is there
    assert one.follower is not None
    for runner in (leader.runner, one.follower._runner):
        graphs = SimpleNamespace(close=lambda rank=runner.stage.communicator.rank: gone.append(f"graphs {rank}"))
        monkeypatch.setattr(runner, "_graphs", graphs)
    leader.close()
    one.ended.result(ENDS_S)
    for rank in (0, 1):
        assert gone.index(f"graphs {rank}") < gone.index(f"group {rank}")


def test_a_rank_that_fails_in_a_step(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    one = pair()
    leader = one.start()
    leader.forward(plan(0))
    assert one.follower is not None
    real = one.follower._runner.forward

    def fail(its_plan: Plan) -> ForwardOutput:
        if its_plan.step == 2:
            raise MemoryError("no memory for it")
        return real(its_plan)

    monkeypatch.setattr(one.follower._runner, "forward", fail)
    leader.forward(plan(1))
    for _ in range(2):  # once in the middle of the step, then at once
        with pytest.raises(RankLost, match=r"^rank 1: MemoryError: no memory for it$"):
            leader.forward(plan(2))
    assert isinstance(one.ended.exception(ENDS_S), MemoryError)
    leader.close()


def test_a_leader_that_fails_in_a_step(pair: Callable[..., Pair]) -> None:
    one = pair()
    leader = one.start()
    wrong = Plan.from_chunks(0, [Chunk(0, 0, [5] * 40, 0, [0], 1)])  # 40 tokens in one page: no rank can run that
    with pytest.raises(RankLost, match=r"^rank [01]: ValueError: slot 0"):
        leader.forward(wrong)
    assert one.ended.exception(ENDS_S) is not None
    leader.close()


@pytest.mark.slow
def test_a_leader_whose_device_is_lost_before_it_leaves(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair()
    leader = one.start()
    leader.forward(plan(0))
    leave = multi_rank._leave_together

    def lost(stage: PipelineStage, device: torch.device) -> None:
        if stage is leader.stage:
            raise RuntimeError("an illegal memory access was encountered")
        leave(stage, device)

    monkeypatch.setattr(multi_rank, "_leave_together", lost)
    leader.close()
    with pytest.raises(RankLost, match=r"^rank 0: RuntimeError: an illegal memory access was encountered$"):
        one.ended.result(ENDS_S)


def test_tokens_that_only_the_first_rank_has(pair: Callable[..., Pair]) -> None:
    one = pair()
    leader = one.start()
    leader.forward(plan(0))
    told = leader.forward(plan(1, 77)).logits.clone()
    leader.last_tokens[0] = 77
    leader.forward(plan(0))
    assert torch.equal(leader.forward(plan(1, -1)).logits, told)
    leader.close()
    assert one.ended.exception(ENDS_S) is None


@pytest.mark.slow
def test_a_rank_that_stands_still_is_heard_no_more(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_rank, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(multi_rank, "SILENT_MS", 1000)
    with closing(Engine(tiny_model("llama"), settings(tp=2))) as engine:
        executor = engine.executor
        assert isinstance(executor, MultiRankExecutor) and not executor.silent_ranks
        (process,) = executor._processes
        os.kill(process.pid, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + ENDS_S
            while not executor.silent_ranks and time.monotonic() < deadline:
                time.sleep(0.05)  # another process's doing
            assert list(executor.silent_ranks) == [1]
        finally:
            process.kill()


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "CONNECT_S", 0.2)
    store, meeting = open_store()
    del store
    with pytest.raises(RankLost, match="leading rank"):
        find_store(meeting)


def test_ranks_of_one_machine_meet_where_others_cannot_reach_it() -> None:
    before = set(psutil.Process().net_connections(kind="inet"))
    store, meeting = open_store()
    opened = [found for found in psutil.Process().net_connections(kind="inet") if found not in before]
    listening = {found.laddr for found in opened if found.status == psutil.CONN_LISTEN}
    assert {f"{ip}:{port}" for ip, port in listening} == {meeting.address.removeprefix("tcp://")}
    find_store(meeting).set("a", "b")
    assert store.get("a") == b"b"
