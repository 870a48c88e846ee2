"""A replica that computes nothing keeps the pace of one that does, and what stands in front of it is accounted for."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from bench.replica import cpu_usage, mock_replica, over_http, replica, streams
from bench.replica.mock_replica import MockExecutor, MockSampler, Pace
from bench.replica.offline_workloads import JOBS
from bench.replica.server_process import end
from bench.secret import SECRET
from worker.curve import REPLICA, Curve
from worker.messages import Generate, Output, Outputs, SamplingParams, decode_from_replica, encode
from worker.step import Chunk, Plan

Fake = Any  # of conftest.py


def test_it_says_as_much_as_it_is_asked_for() -> None:
    engine = mock_replica.engine(Pace(0.0, 0.0))
    prompts, lengths = JOBS["mini"](0.03)
    job = prompts, [length // 10 for length in lengths]
    said = engine.generate(job[0], replica.sampling(job))
    assert [len(done.token_ids) for done in said] == job[1]
    ids = {token_id for done in said for token_id in done.token_ids}
    assert len(ids) > 50 and min(ids) >= mock_replica.LOWEST_ID and max(ids) < mock_replica.HIGHEST_ID
    engine.check_integrity()
    engine.close()


def test_a_step_ends_when_a_gpu_would_have_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    slept: list[float] = []
    monkeypatch.setattr(mock_replica.time, "perf_counter", lambda: now)
    monkeypatch.setattr(mock_replica.time, "sleep", slept.append)
    executor = MockExecutor(2, Pace(step_s=1.0, token_s=0.5))
    sampler = MockSampler(executor, 2)
    sampler.add(0, SamplingParams(max_tokens=9, temperature=0.0), [5, 6, 7], [], (), None)
    plan = Plan.from_chunks(0, [Chunk(0, 0, [5, 6, 7], 0, [0], 1), Chunk(1, 0, [5], 0, [1], 0)])

    def step() -> Any:
        output = executor.forward(plan)
        return sampler.launch(output.logits, plan.slots[:1].astype(np.int64), output.greedy_tokens)

    first, second = step(), step()  # the second waits for the first
    assert len(first.result().token_ids) == 1 and slept == [3.0]
    now = 104.5
    second.result()
    now = 110.0
    third = step()  # the device was idle until then
    now = 120.0
    third.result()
    assert slept == [3.0, 1.5, 0.0] and third.ends_s == 113.0


def test_cpu_time_is_told_apart_by_what_a_process_is_for() -> None:
    before = cpu_usage.cpu_s()
    work = "sum(i * i for i in range(2_000_000)); print('done', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", work, "ray::Rank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        used = cpu_usage.since(before)
    finally:
        end(child)
    assert used["ranks"] > 0.02 and used[cpu_usage.CLIENT] >= 0


def test_figures_are_of_what_stands_in_front() -> None:
    def measured(**cpu_s: float) -> dict[str, Any]:
        return {"output_tok_s": 90.0, "rounds": [{"output_tokens": 1000, "cpu_s": cpu_s}] * 2}

    found = {"listening": measured(routers=0.02, ranks=9.0), "proxied": measured(routers=0.06, proxies=0.05)}
    values = {
        figure.name: (figure.value, figure.higher_is_better) for figure in streams.figures("cpu.streams", 100.0, found)
    }
    assert values == {
        "cpu.streams.listening.vs_offline": (0.9, True),
        "cpu.streams.listening.cpu_us_per_token": (pytest.approx(20.0), False),
        "cpu.streams.proxied.vs_offline": (0.9, True),
        "cpu.streams.proxied.cpu_us_per_token": (pytest.approx(110.0), False),
    }
    assert "ranks 9000.0, routers 20.0" in over_http.line(found["listening"])


@pytest.mark.bench
def test_it_answers_as_a_replica_does() -> None:
    with streams.silent_replica() as address, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        Curve(SECRET, REPLICA).calls(socket)
        socket.connect(address)
        socket.send(encode(Generate(request_id="a", prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4))))
        said: list[Output] = []
        while not said or said[-1].finish_reason is None:
            assert socket.poll(20_000)
            message = decode_from_replica(socket.recv())
            said += message.outputs if isinstance(message, Outputs) else []
    assert sum(len(output.token_ids) for output in said) == 4 and said[-1].finish_reason == "length"


def test_every_front_gets_a_replica_and_the_same_job(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fronts: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def front(kind: str, folder: Path, address: str, routers: int) -> Iterator[str]:
        fronts.append((kind, address.partition("://")[0], routers))
        yield fake.url

    monkeypatch.setattr(streams, "front", front)
    monkeypatch.setattr(streams, "silent_replica", lambda: contextlib.nullcontext("tcp://there"))
    monkeypatch.setattr(streams, "offline", lambda job, rounds: 1000.0)
    arguments = ["--scale", "0.01", "--rounds", "1", "--routers", "3", "--out", str(tmp_path)]
    assert streams.main(arguments) == 0
    assert fronts == [("listening", "tcp", 3), ("proxied", "tcp", 3)]
    assert len(fake.bodies) == 2 * 2 * len(JOBS["mini"](0.01)[0])
    found = json.loads((tmp_path / "cpu.streams.routers3.json").read_text())
    names = {figure["name"] for figure in found["figures"]}
    assert len(names) == 4 and "cpu.streams.routers3.proxied.vs_offline" in names
    assert found["fronts"]["proxied"]["rounds"][0]["cpu_s"]["client"] >= 0
