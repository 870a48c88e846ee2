"""Replicas and layouts for a traffic, by simulation."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.load import options
from bench.load.workload import Vocabulary
from bench.pipeline import plan
from bench.replica import dummy_models


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """Requests of 300 prompt tokens and 20 output tokens, without times."""
    file = tmp_path / "lengths.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n" + "300,20\n" * 40)
    return file


@pytest.fixture
def run(tmp_path: Path, traffic: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))

    def planned(shape: str, *arguments: str, to: Path = traffic) -> dict[str, Any] | None:
        folder = dummy_models.write(shape, tmp_path / shape)
        line = ["--model", str(folder), "--traffic", str(to), "--name", "n", "--out", str(tmp_path), *arguments]
        return json.loads((tmp_path / "n.json").read_text()) if plan.main(line) == 0 else None

    return planned


def test_as_many_replicas_as_the_rate_needs(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("llama-8b", "--device", "NVIDIA H200", "--gpus", "2", "--rate", "100", "--tp", "1", "--pp", "1")
    (one,) = found["carrying"]
    assert one["layout"] == "tp1" and 50 < one["rate_of_one"] < 1000 and not one["is_measured"]
    assert one["replicas"] == one["gpus"] == -(-100 // one["rate_of_one"])
    assert one["ttft_s"]["p99"] <= 1.0 and one["tbt_s"]["p99"] <= 0.1
    assert f"--replicas {one['replicas']}\n" in capsys.readouterr().out
    found = run("llama-8b", "--device", "A100", "--gpus", "2", "--rate", "100", "--tp", "1", "--pp", "1")
    assert found["carrying"][0]["rate_of_one"] < 0.7 * one["rate_of_one"]


def test_a_gpu_has_a_gpus_defaults(tmp_path: Path, traffic: Path) -> None:
    """Also where it is planned on a machine without one: steps of 512 tokens would carry two thirds as much."""
    folder = dummy_models.write("llama-8b", tmp_path / "model")

    def config(device: str, *arguments: str) -> tuple[str, int, bool]:
        line = ["--model", str(folder), "--traffic", str(traffic), "--device", device, "--tp", "1", "--pp", "1"]
        args = plan.parser().parse_args([*line, *arguments])
        made = plan.simulated(args, plan.layouts(args)[0], folder, longest=320).config
        return made.schedule_name, made.token_budget, made.max_running > 64

    assert config("NVIDIA H200") == ("uniform", 8192, True)
    assert config("NVIDIA H200", "--token-budget", "1024", "--max-running", "9") == ("uniform", 1024, False)
    assert config("cpu") == ("fixed_chunk", 512, False)


def test_the_fewest_gpus_that_are_enough_come_first(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("llama-70b", "--device", "NVIDIA H200", "--gpus", "4", "--rate", "4", "--requests", "20")
    assert [each["layout"] for each in found["carrying"]][:1] == ["tp2"]  # its weights leave one GPU no room
    assert {"tp2", "tp4", "tp2pp2"} <= {each["layout"] for each in found["carrying"]}
    assert "shoal serve" in capsys.readouterr().out
    assert run("llama-70b", "--device", "NVIDIA H200", "--gpus", "2", "--tp", "2", "--rate", "900", "--requests", "20")
    assert "2 are too few: 1 replicas of tp2 carry" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "H200"], "no times: say how many requests come in a second (--rate)"),
        (["--device", "T9", "--rate", "1"], "the rates of 'T9' are not known"),
        (["--device", "H200", "--rate", "1", "--context-length", "20"], "outputs of 20 tokens do not fit"),
        (["--device", "H200", "--rate", "1", "--kv-tokens", "160"], "room for 160 tokens of KV, and requests have up"),
        (["--device", "H200", "--rate", "1", "--slo-tbt", "0.0001"], "tp1 carries no rate within the limits"),
        (["--device", "H200", "--rate", "1", "--page-size", "999"], "page_size"),
    ],
)
def test_what_cannot_be_planned_is_said(
    arguments: list[str], said: str, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("llama-8b", *arguments) is None
    assert said in capsys.readouterr().err


def test_the_error_is_measured_at_a_server(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that carries 100 requests a second."""
    started: list[list[str]] = []
    prompts: list[list[int]] = []

    @contextlib.contextmanager
    def server(arguments: list[str]) -> Iterator[str]:
        started.append(arguments)
        yield "http://here"

    def put(url: str, arguments: list[str]) -> dict[str, Any]:
        args = options.parser().parse_args(arguments)
        words = Vocabulary(args.seed, *args.token_range)
        prompts.append(words.ids(options.plan(args)[0].turns[0].spans))
        rate = float(arguments[arguments.index("--rate") + 1])
        return {"attained": float(rate <= 100.0), "failures": {}, "ttft_s": {"p99": 0.1}}

    monkeypatch.setattr(plan, "server", server)
    monkeypatch.setattr(plan, "put", put)
    found = run("tiny", "--device", "cpu", "--rate", "9", "--load-format", "dummy", "--measure")
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert figures["n.measured_rate"] == pytest.approx(100.0, rel=plan.PRECISION)
    assert figures["n.error"] == pytest.approx(abs(figures["n.rate"] / figures["n.measured_rate"] - 1.0))
    assert {"--device", "cpu", "--replicas", "1"} <= set(started[0])
    assert len(set(map(tuple, prompts))) == len(prompts) > 3  # else all but one of the rates find them in the cache
