"""A job over HTTP is sent token for token and counted by the server's own tokens."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.replica import cpu_usage, over_http
from bench.replica.offline_workloads import JOBS, MAX_TOKEN_ID
from bench.replica.server_process import ServerFailed, end

Fake = Any  # of conftest.py
JOB = ([[1, 2, 3], [MAX_TOKEN_ID, 5]], [4, 2])


@pytest.fixture
def started(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """`server` gives the fake one; returns what it was started with."""
    arguments: list[Sequence[str]] = []

    @contextlib.contextmanager
    def server(given: Sequence[str]) -> Iterator[str]:
        arguments.append(given)
        yield fake.url

    monkeypatch.setattr(over_http, "server", server)
    return arguments


def test_each_round_sends_every_prompt_with_other_tokens(fake: Fake, started: list[Sequence[str]]) -> None:
    settings = {"load_format": "dummy", "kv_tokens": 64, "overlap": False}
    found = over_http.measure(Path("some/tiny"), settings, JOB, 1, 2)
    assert started == [["--model", "some/tiny", "--load-format", "dummy", "--kv-tokens", "64", "--no-overlap"]]
    sent = sorted((body["prompt"], body["max_tokens"]) for body in fake.bodies)
    assert sent == sorted(
        (prompt, length)
        for by in (-1, 0, 1)
        for prompt, length in zip(
            [[1 + by, 2 + by, 3 + by], [(MAX_TOKEN_ID + by) % 10001, 5 + by]], JOB[1], strict=True
        )
    )
    assert all(body["stream"] and body["ignore_eos"] and body["model"] == "tiny" for body in fake.bodies)
    assert [summary["output_tokens"] for summary in found["rounds"]] == [6, 6]
    rates = sorted(summary["output_tokens_per_s"] for summary in found["rounds"])
    assert rates[0] <= found["output_tok_s"] <= rates[1]


def test_a_request_that_fails_fails_the_measurement(fake: Fake, started: list[Sequence[str]]) -> None:
    fake.faults = {1: "overloaded"}
    with pytest.raises(ServerFailed, match=r"\b1 .*http_429"):
        over_http.measure(Path("tiny"), {}, JOB, 0, 1)


def test_a_shifted_job_has_the_same_lengths_and_nothing_in_common() -> None:
    prompts, lengths = JOBS["mini"](0.05)
    moved, same = over_http.shifted((prompts, lengths), 1)
    assert same == lengths and [len(prompt) for prompt in moved] == [len(prompt) for prompt in prompts]
    assert not {tuple(prompt[:16]) for prompt in moved} & {tuple(prompt[:16]) for prompt in prompts}
    assert over_http.shifted((prompts, lengths), 0) == (prompts, lengths)


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
    measured = {"output_tok_s": 90.0, "rounds": [{"output_tokens": 1000, "cpu_s": {"routers": 0.02, "ranks": 9.0}}] * 2}
    assert "ranks 9000.0, routers 20.0" in over_http.line(measured)
