"""`shoal bench serve` from its command line to its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.load import serve
from bench.load.options import UsageError, parser, plan, settings

Fake = Any  # of conftest.py
Captured = pytest.CaptureFixture[str]
SHORT = ["--prompt-tokens", "6", "--output-tokens", "3", "--quiet", "--name", "t"]


def planned(*argv: str) -> tuple[list, dict]:
    args = parser().parse_args(list(argv))
    return plan(args), settings(args)


def trace_file(folder: Path) -> Path:
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 40, "input_length": 900, "output_length": 2, "hash_ids": [0, 2]},
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


# ---------------------------------------------------------------- options


def test_by_default_eight_at_a_time() -> None:
    sessions, said = planned()
    assert len(sessions) == 100 and {session.arrival_s for session in sessions} == {None}
    assert said["concurrency"] == 8 and said["load"] == "random, 8 at once"


def test_the_seed_decides_prompts_and_arrivals_and_the_rate_only_arrivals() -> None:
    lengths = ["--prompt-tokens", "uniform:5:50"]
    one, same = planned(*lengths, "--rate", "4")[0], planned(*lengths, "--rate", "4")[0]
    faster, other = planned(*lengths, "--rate", "8")[0], planned(*lengths, "--rate", "4", "--seed", "1")[0]
    assert one == same != other
    assert [session.turns for session in one] == [session.turns for session in faster]
    assert one[9].arrival_s == pytest.approx(2 * faster[9].arrival_s)


def test_a_trace_goes_by_its_own_times_unless_told(tmp_path: Path) -> None:
    trace = ["--trace", str(trace_file(tmp_path)), "--scale", "16", "--max-prompt", "40"]
    sessions, said = planned(*trace)
    assert [session.arrival_s for session in sessions] == [0.0, 0.04]
    assert [session.turns[0].prompt_tokens for session in sessions] == [38, 40]
    assert said["load"] == "trace trace.jsonl, the trace's times x 1" and said["prompts_cut"] == 1
    assert planned(*trace, "--time-scale", "2.5")[0][1].arrival_s == pytest.approx(0.1)
    assert planned(*trace, "--concurrency", "2")[0][1].arrival_s is None
    assert planned(*trace, "--rate", "5")[0][1].arrival_s not in (0.04, None)
    assert len(planned(*trace, "--requests", "1")[0]) == 1
    assert str(tmp_path) not in json.dumps(said)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--groups", "3"], "--groups .*--workload random"),
        (["--workload", "shared-prefix", "--turns", "3"], "--turns .*--workload shared-prefix"),
        (["--workload", "multi-turn", "--requests", "3"], "--requests .*--workload multi-turn"),
        (["--time-scale", "2"], "--time-scale .*--workload random"),
        (["--trace", "x", "--prompt-tokens", "5"], "--prompt-tokens .*--trace"),
    ],
)
def test_an_option_that_would_do_nothing_is_an_error(argv: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        planned(*argv)


def test_a_trace_without_times_has_no_time_scale(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n10,2\n")
    assert planned("--trace", str(path))[1]["concurrency"] == 8
    with pytest.raises(UsageError, match="has no times"):
        planned("--trace", str(path), "--time-scale", "1")


@pytest.mark.parametrize(
    "argv",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--concurrency", "0"],
        ["--rate", "1", "--concurrency", "1"],
        ["--prompt-tokens", "many"],
        ["--token-range", "9:3"],
        ["--extra", "[1]"],
        ["--slo-ttft", "-1"],
        ["--workload", "none"],
        ["--reqests", "3"],
    ],
)
def test_a_wrong_command_line_exits_with_2(argv: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as raised:
        serve.main(argv)
    assert raised.value.code == 2 and "error:" in capsys.readouterr().err


# ---------------------------------------------------------------- runs


def run(fake: Fake, folder: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    code = serve.main(["--url", fake.url, "--out", str(folder), *SHORT, *argv])
    return code, json.loads((folder / "t.json").read_text())


@pytest.mark.bench
def test_a_run_leaves_a_table_a_file_and_a_picture(fake: Fake, tmp_path: Path, capsys: Captured) -> None:
    code, result = run(fake, tmp_path, "--requests", "12", "--rate", "200", "--slo-ttft", "30", "--warmup", "2")
    assert code == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.png"]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    summary, figures = result["summary"], {figure["name"]: figure["value"] for figure in result["figures"]}
    assert (summary["answered"], summary["output_tokens"], summary["prompt_tokens"]) == (12, 36, 72)
    assert figures["t.hit_rate"] == 0.5 and figures["t.attained"] == 1.0 and figures["t.failures"] == 0
    assert 0 < figures["t.ttft.p50"] <= figures["t.ttft.p99"] < 30
    assert len(result["requests"]["ttft_s"]) == 12 and result["settings"]["rate"] == 200
    assert len(fake.bodies) == 1 + 2 + 12  # the probe, the warm-up, the load
    shown = capsys.readouterr().out
    assert "TTFT" in shown and "12 of 12 requests" in shown
    assert "50.0%" in shown


@pytest.mark.bench
def test_failures_are_told_and_counted(fake: Fake, tmp_path: Path, capsys: Captured) -> None:
    fake.faults = {2: "overloaded", 4: "hangs up", 5: "error"}
    code, result = run(fake, tmp_path, "--requests", "8", "--concurrency", "1")
    assert code == 0
    assert result["summary"]["failures"] == {"http_429": 1, "disconnected": 1, "stream_error": 1}
    assert result["requests"]["error"].count(None) == 5
    shown = capsys.readouterr().out
    assert "http_429 (too many requests)" in shown and "stream_error (out of luck)" in shown


@pytest.mark.bench
def test_a_server_that_takes_little_is_measured_all_the_same(fake: Fake, tmp_path: Path, capsys: Captured) -> None:
    fake.ids = fake.ignore_eos = fake.chunk_usage = fake.usage = False
    code, result = run(fake, tmp_path, "--requests", "3")
    assert code == 0 and result["summary"]["answered"] == 3 and result["summary"]["prompt_tokens"] is None
    assert set(result["settings"]["server_takes"].values()) == {False}
    assert isinstance(fake.bodies[-1]["prompt"], str)
    shown = " ".join(capsys.readouterr().out.split())
    assert "usage" in shown and "prompt: must be a string" in shown, "what it does not take, and its own words"


@pytest.mark.bench
def test_several_tokens_in_a_chunk_are_pointed_out(fake: Fake, tmp_path: Path, capsys: Captured) -> None:
    fake.per_chunk = 2
    result = run(fake, tmp_path, "--requests", "2", "--output-tokens", "8")[1]
    assert result["summary"]["tokens_per_chunk"] == 2.0
    assert "2.00 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.bench
def test_conversations_over_both_endpoints(fake: Fake, tmp_path: Path, endpoint: str) -> None:
    argv = ["--workload", "multi-turn", "--sessions", "2", "--turns", "2", "--endpoint", endpoint]
    code, result = run(fake, tmp_path, *argv)
    assert code == 0 and result["summary"]["answered"] == 4 and sorted(result["requests"]["turn"]) == [0, 0, 1, 1]


@pytest.mark.bench
def test_a_trace_is_run(fake: Fake, tmp_path: Path) -> None:
    argv = ["--trace", str(trace_file(tmp_path)), "--scale", "64", "--out", str(tmp_path / "out")]
    assert serve.main(["--url", fake.url, "--quiet", "--name", "t", *argv]) == 0
    first, second = (body["prompt"] for body in fake.bodies[1:])
    assert (len(first), len(second)) == (10, 15) and first[:8] == second[:8] and first[8:] != second[8:10]


def test_no_server_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    assert serve.main(["--url", "http://127.0.0.1:1", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "http://127.0.0.1:1" in said and len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_refuses_all_is_one_line(fake: Fake, tmp_path: Path, capsys: Captured) -> None:
    fake.faults = {0: "broken"}
    assert serve.main(["--url", fake.url, "--out", str(tmp_path)]) == 1
    assert "http_502" in capsys.readouterr().err


@pytest.mark.bench
def test_when_all_fails_the_exit_code_says_so(fake: Fake, tmp_path: Path) -> None:
    fake.faults = dict.fromkeys(range(1, 4), "error")
    code, result = run(fake, tmp_path, "--requests", "3")
    assert code == 1 and result["summary"]["failures"] == {"stream_error": 3}
