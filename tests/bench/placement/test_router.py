"""What `bench.placement.router` sends and what it makes of the server's figures. No server of Shoal's is started
here."""

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load import trace
from bench.load.http import Http
from bench.load.trace import TraceRequest
from bench.load.workload import Vocabulary
from bench.placement import router
from bench.placement.conversations import BLOCK, conversations, sample
from bench.replica import server_process
from bench.replica.server_process import ServerFailed


def row(*blocks: int, at_s: float = 0.0) -> TraceRequest:
    return TraceRequest(512 * len(blocks), 8, at_s, blocks, 512)


def options(*words: str) -> argparse.Namespace:
    return router.parser().parse_args(words)


# ---------------------------------------------------------------- conversations

# 0 is in front of all; 20 conversations of two requests, and some requests of one block.
TRACE = [row(0, 100 + i % 20, 200 + i, at_s=i) for i in range(40)] + [row(0, at_s=40.0 + i) for i in range(5)]


@pytest.mark.parametrize("seed", range(5))
def test_conversations_are_sampled_whole_and_in_order(seed: int) -> None:
    kept = sample(TRACE, 3, seed)
    assert 0 < len(kept) < len(TRACE)
    assert kept == [row for row in TRACE if row in kept]
    second = {row.blocks[1] for row in kept if len(row.blocks) > 1}
    assert [row for row in kept if len(row.blocks) > 1] == [
        r for r in TRACE if len(r.blocks) > 1 and r.blocks[1] in second
    ]


def test_a_sample_depends_on_the_seed_alone() -> None:
    assert sample(TRACE, 3, 1) == sample(TRACE, 3, 1) != sample(TRACE, 3, 2)
    assert sample(TRACE, 1, 7) == TRACE


def test_one_conversation_in_ten_is_about_a_tenth() -> None:
    rows = [row(0, i // 2, 10_000 + i) for i in range(2, 4002)]
    assert 320 < len(sample(rows, 10, 0)) < 480


def test_a_trace_that_shares_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="share a prefix"):
        sample([TraceRequest(100, 10, 0.0), TraceRequest(200, 10, 1.0)], 2, 0)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40), most=st.integers(16, 600))
def test_made_up_conversations_grow_turn_by_turn(seed: int, count: int, most: int) -> None:
    made = conversations(seed, count, 60.0, most)
    assert [s.arrival_s for s in made] == sorted(s.arrival_s or 0.0 for s in made)
    by_conversation: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}
    for session in made:
        (turn,) = session.turns
        assert turn.prompt_tokens <= most and 1 <= turn.output_tokens <= 32
        assert turn.spans[0].tokens == BLOCK
        by_conversation.setdefault(turn.spans[1].key[:2], []).append(turn.spans)
    assert len({spans[0] for all_spans in by_conversation.values() for spans in all_spans}) <= 1
    for said in by_conversation.values():
        assert len(said) <= 8
        for earlier, later in itertools.pairwise(said):
            assert later[:-1] == earlier


# ---------------------------------------------------------------- the workload


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    lines = [
        {
            "timestamp": 1000 * (row.arrival_s or 0.0) + 10_000,
            "input_length": row.prompt_tokens,
            "output_length": 640,
            "hash_ids": row.blocks,
        }
        for row in TRACE
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_trace_is_scaled(mooncake: Path) -> None:
    line = ("--trace", str(mooncake), "--one-in", "1", "--max-prompt", "20", "--time-scale", "0.5", "--requests", "41")
    work = router.workload(options(*line))
    assert work.page_size == 8
    assert [session.arrival_s for session in work.sessions] == [i / 2 for i in range(41)]
    turns = [session.turns[0] for session in work.sessions]
    assert {turn.output_tokens for turn in turns} == {10}
    assert [turn.prompt_tokens for turn in turns] == [20] * 40 + [8]
    ids = [Vocabulary().ids(turn.spans) for turn in turns]
    assert ids[0][:16] == ids[20][:16] and ids[0][16:] != ids[20][16:]
    assert ids[0][:8] == ids[1][:8] == ids[40] and ids[0][8:16] != ids[1][8:16]
    about = work.about
    assert about["workload"] == "trace some.jsonl" and str(mooncake.parent) not in json.dumps(about)
    assert (about["requests"], about["prompts_cut"], about["prompt_tokens"]) == (41, 40, 808)


def test_the_first_request_of_a_sample_comes_at_once(mooncake: Path) -> None:
    work = router.workload(options("--trace", str(mooncake), "--one-in", "4", "--seed", "3"))
    assert work.sessions[0].arrival_s == 0 and len(work.sessions) < 40


def test_without_a_trace_there_are_conversations() -> None:
    work = router.workload(options("--requests", "30"))
    assert len(work.sessions) == 30 and work.page_size == BLOCK and work.about["workload"] == "synthetic conversations"
    assert work == router.workload(options("--requests", "30"))
    assert work.sessions != router.workload(options("--requests", "30", "--seed", "1")).sessions


def test_a_trace_that_cannot_be_used_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("num_prefill_tokens,num_decode_tokens\n100,5\n")
    assert router.main(["--trace", str(azure)]) == 2
    assert "share a prefix" in capsys.readouterr().err
    assert router.main(["--trace", str(tmp_path / "none")]) == 2


def test_a_sample_of_nothing_is_refused(mooncake: Path) -> None:
    args = options("--trace", str(mooncake), "--one-in", "1000000")
    with pytest.raises(ValueError, match="smaller number"):
        router.workload(args)


# ---------------------------------------------------------------- figures

METRICS = """\
# HELP shoal_steps_total Steps that the scheduler made
shoal_steps_total{model="m",replica="a"} 12.0
shoal_output_tokens_total{replica="a"} 1.5e+06
shoal_output_tokens_total{replica="b"} 0.0
shoal_request_seconds_bucket{le="0.5",model="m",replica="a"} 3.0
shoal_http_responses_total{path="/v1/models",status="200"} 1.0
"""


def test_the_page_is_read_by_replica() -> None:
    assert router.page(METRICS) == {"shoal_steps_total": {"a": 12}, "shoal_output_tokens_total": {"a": 1.5e6, "b": 0}}


def metrics_page(**replicas: tuple[int, int, int, int]) -> router.Page:
    """Each replica's requests, prompt tokens, cached tokens, output tokens."""
    names = router.COUNTERS.values()
    return {name: {replica: float(row[i]) for replica, row in replicas.items()} for i, name in enumerate(names)}


def test_token_load_is_what_was_computed_in_between() -> None:
    before, after = metrics_page(b=(1, 10, 0, 4), a=(2, 20, 5, 4)), metrics_page(b=(3, 110, 60, 9), a=(2, 20, 5, 4))
    idle, busy = router.per_replica(before, after, [{"a": 0.0, "b": 10.0}, {"b": 30.0}])
    assert busy == {
        "requests": 2,
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "output_tokens": 5,
        "token_load": 45,
        "held_tokens": 20,
    }
    assert set(idle.values()) == {0.0}


def test_a_lost_replica_spoils_the_run() -> None:
    with pytest.raises(ServerFailed, match="lost"):
        router.per_replica(metrics_page(a=(0, 0, 0, 0)), metrics_page(b=(9, 9, 9, 9)), [])


@pytest.mark.parametrize(
    ("loads", "expected"),
    [([5, 5, 5, 5], 1.0), ([8, 0, 0, 0], 4.0), ([6, 4, 1, 1], 2.0), ([3], 1.0), ([0, 0], 1.0)],
)
def test_imbalance(loads: list[float], expected: float) -> None:
    assert router.imbalance(loads) == expected


def placement(hit_rate: float, imbalance: float) -> dict[str, Any]:
    return {"summary": {"hit_rate": hit_rate}, "imbalance": imbalance}


def test_figures() -> None:
    found = {
        "round_robin": placement(0.1, 1.1),
        "least_load": placement(0.12, 1.0),
        "cache_aware": placement(0.25, 1.2),
    }
    assert [(f.name, f.value, f.unit, f.higher_is_better) for f in router.figures(found)] == [
        ("cpu.router.hit_rate.vs_round_robin", 2.5, "ratio", True),
        ("cpu.router.load_imbalance", 1.2, "ratio", False),
    ]
    with pytest.raises(ValueError, match="nothing cached"):
        router.figures(found | {"round_robin": placement(0.0, 1.0)})


# ---------------------------------------------------------------- a run


async def counted(http: Http, fake: Any) -> router.Page:
    """The metrics that the fake would have, were it one replica of two."""
    output = sum(body["max_tokens"] for body in fake.bodies)
    rows = metrics_page(a=(len(fake.bodies), 100, 0, output), b=(0, 0, 0, 0))
    return rows | {router.WAITING: {"a": 6.0, "b": 0.0}, router.CONTEXT: {"a": 1.0, "b": 0.0}}


@pytest.mark.bench
def test_a_load_is_measured(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_page", lambda http: counted(http, fake))
    args = options("--replicas", "2", "--quiet", "--requests", "5")
    sessions = [session.__class__(session.turns, 0.0) for session in router.workload(args).sessions]
    measured = asyncio.run(router.load(fake.url, sessions, args))
    prompts = [session.turns[0].prompt_tokens for session in sessions]
    assert measured["summary"]["hit_rate"] == pytest.approx(5 * 3 / sum(prompts))
    assert sorted(measured["requests"]["prompt_tokens"]) == sorted(prompts)
    output = sum(session.turns[0].output_tokens for session in sessions)
    assert [replica["token_load"] for replica in measured["replicas"]] == [output + 1, 0]  # and the probe's one token
    assert measured["imbalance"] == 2.0


@pytest.mark.bench
def test_one_failure_fails_the_run(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_page", lambda http: counted(http, fake))
    fake.faults[12] = "overloaded"  # after a probe and 8 requests to warm up, and another probe
    args = options("--replicas", "2", "--quiet", "--requests", "5")
    sessions = [session.__class__(session.turns, 0.0) for session in router.workload(args).sessions]
    with pytest.raises(ServerFailed, match=r"\b1 of 5 .*http_429 \(too many requests\)"):
        asyncio.run(router.load(fake.url, sessions, args))


# ---------------------------------------------------------------- the child


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ServerFailed, match="'--nonsense'"), server_process.server(["--nonsense", "1"]):
        pytest.fail("it cannot be ready")


@pytest.mark.bench
def test_nothing_is_left_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "ORPHANS_S", 0)
    sleep = "import time; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); print(flush=True); {sleep}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        (orphan,) = psutil.Process(process.pid).children()
        server_process.end(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        orphan.wait(10)
    assert process.returncode is not None and not orphan.is_running()
    server_process.end(process)  # and once more, to no harm


def test_sigterm_ends_a_benchmark_by_an_exception() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, server_process.sigterm_raises():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_that_ignores_signals_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "END_S", 0.01)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        server_process.end(process)
    assert process.returncode == -9


def test_the_trace_of_these_tests_is_read_as_it_was_written(mooncake: Path) -> None:
    assert [row.blocks for row in trace.read(mooncake)] == [row.blocks for row in TRACE]
