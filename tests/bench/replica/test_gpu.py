"""One replica's figures, on a tiny model and without a GPU: all of the command but the device."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from bench.pipeline.command import LINKS
from bench.replica import dummy_models, gpu, link_speed, replica
from bench.replica.decode_profile import observe
from bench.replica.offline_workloads import pressure
from bench.replica.replica import Round, TimedJob
from bench.replica.server_process import ServerFailed
from bench.targets import TARGETS
from worker.config import WorkerConfig
from worker.messages import SamplingParams

TINY = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "kv_tokens": 8192, "context_length": 4096}
FLAGS = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--kv-tokens", "16384", "--rounds", "1"]


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = gpu.main([*FLAGS, "--warm-rounds", "0", "--out", str(tmp_path), "--name", "found", *arguments])
    return status, json.loads((tmp_path / "found.json").read_text())


@pytest.mark.bench
def test_every_workload_gives_its_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    asked = ["--workloads", "mini,bs1,prefill", "--scale", "0.004", "--first-token", "16,300"]
    status, found = run(tmp_path, *asked, "--token-budget", "2048")
    assert status == 0
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert figures.keys() == {
        "cpu.tiny.start_to_first_token.seconds",
        "cpu.tiny.mini_x0.004.output_tok_s",
        "cpu.tiny.bs1_x0.004.decode_tok_s",
        "cpu.tiny.prefill_x0.004.input_tok_s",
        "cpu.tiny.first_token.t16.seconds",
        "cpu.tiny.first_token.t300.seconds",
    }
    # The rate of so few decodes is over a difference of two times, which a busy machine makes negative.
    assert all(value > 0 for name, value in figures.items() if "bs1" not in name)
    assert found["mini"]["output_tokens"] / found["mini"]["seconds"][0] == pytest.approx(
        figures["cpu.tiny.mini_x0.004.output_tok_s"], rel=0.01
    )
    assert found["settings"]["token_budget"] == 2048 and found["start"]["kv_tokens"] == 16384
    assert "cpu.tiny.bs1_x0.004.decode_tok_s" in capsys.readouterr().out
    assert "CPU in float32" in caplog.text, "as the ranks of other processes say it"


@pytest.mark.bench
def test_stages_and_what_joins_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in link_speed.SOCKETS:
        monkeypatch.setenv(name, "")  # as it was, afterwards
    seen: list[str] = []

    def measure(device: str) -> link_speed.Speed:
        seen.append(os.environ["NCCL_NET"])
        return link_speed.Speed({1: 1e-4}, 1e-4, 2e9)

    monkeypatch.setattr(link_speed, "measure", measure)
    asked = ["--pp", "2", "--link", "sockets", "--schedule", "fixed_chunk"]
    status, found = run(tmp_path, "--workloads", "prefill", "--scale", "0.004", *asked)
    assert status == 0 and seen == ["Socket"]
    assert found["link"]["bytes_per_s"] == 2e9 and found["settings"]["pp"] == 2
    assert {figure["name"] for figure in found["figures"]} == {
        "cpu.tiny.pp2.sockets.fixed_chunk.start_to_first_token.seconds",
        "cpu.tiny.pp2.sockets.fixed_chunk.prefill_x0.004.input_tok_s",
    }


@pytest.mark.bench
def test_under_pressure_every_request_gets_all_its_tokens_and_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, lengths = pressure(0.02)
    job = [prompt[:200] for prompt in prompts], [100] * len(lengths)
    monkeypatch.setitem(gpu.JOBS, "pressure", lambda scale: job)
    status, found = run(tmp_path, "--workloads", "pressure,prefill", "--scale", "0.02")
    assert status == 0 and found["pressure"]["kv_tokens"] == 5 * 300 // 2
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert figures["cpu.tiny.pressure_x0.02.same"] == 1
    assert 0 <= figures["cpu.tiny.pressure_x0.02.recomputed"] < 0.5
    assert figures["cpu.tiny.pressure_x0.02.output_tok_s"] > 0
    assert "100.0% of outputs" in capsys.readouterr().out


@pytest.mark.bench
def test_what_is_computed_again_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that might end early are expected to: the scheduler lets in too many, and has to preempt."""
    folder = dummy_models.write("tiny", tmp_path)
    rng = random.Random(0)
    job = [[rng.randrange(9000) for _ in range(64)] for _ in range(8)], [150] * 8
    # No token that the model likes: all go to their limits.
    monkeypatch.setattr(
        replica,
        "sampling",
        lambda job: [SamplingParams(max_tokens=150, temperature=0.0, stop_token_ids=(10239,)) for _ in job[1]],
    )
    with replica.started(folder, WorkerConfig(**TINY)) as engine:
        found = replica.press(engine, folder, WorkerConfig(**TINY | {"kv_tokens": 448, "context_length": 224}), job)
        assert found.timed.preemptions > 0 and found.recomputed > 0 and found.same == 1
        # The engine has all its pages again.
        assert engine.executor.num_pages == 512 and replica.generate(engine, job).outputs == found.whole.outputs


@pytest.mark.bench
def test_a_request_that_fails_or_is_short_is_no_measurement(tmp_path: Path) -> None:
    with replica.started(
        dummy_models.write("tiny", tmp_path), WorkerConfig(**TINY | {"context_length": 512})
    ) as engine:
        with pytest.raises(RuntimeError, match="a request failed"):
            replica.generate(engine, ([[20_000]], [4]))
        with pytest.raises(RuntimeError, match=r"\b511 tokens .*\b900\b"):
            replica.generate(engine, ([[1]], [900]))


@pytest.mark.bench
def test_decoding_is_observed_at_the_batch_that_is_asked_for(tmp_path: Path) -> None:
    with replica.started(dummy_models.write("tiny", tmp_path), WorkerConfig(**TINY | {"max_running": 4})) as engine:
        for grammar in (False, True):
            seen = observe(engine, 3, 5, grammar)
            assert (seen.batch, seen.steps, seen.timeline, seen.host_step_s) == (3, 5, None, None)
            assert seen.step_s > 0 and seen.traced_step_s > 0
            assert not engine.has_work
        with pytest.raises(ValueError, match="allows 4"):
            observe(engine, 5, 5, False)
        engine.check_integrity()


@pytest.mark.bench
def test_http_beside_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def measure(folder: Path, settings: dict[str, Any], job: Any, warm_rounds: int, rounds: int) -> dict[str, Any]:
        asked.update(settings, prompts=len(job[0]))
        return {"output_tok_s": 1.0, "rounds": []}

    monkeypatch.setattr("bench.replica.over_http.measure", measure)
    status, found = run(tmp_path, "--workloads", "mini", "--scale", "0.004", "--http", "--routers", "2")
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert status == 0
    assert figures["cpu.http.mini.vs_offline"] == pytest.approx(1 / figures["cpu.tiny.mini_x0.004.output_tok_s"])
    assert asked["replicas"] == 1 and asked["routers"] == 2 and asked["load_format"] == "dummy"
    assert asked["prompts"] == 1


@pytest.mark.bench
def test_without_a_server_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*arguments: Any) -> dict[str, Any]:
        raise ServerFailed("it did not start")

    monkeypatch.setattr("bench.replica.over_http.measure", measure)
    status, found = run(tmp_path, "--workloads", "mini", "--scale", "0.004", "--http")
    assert status == 1 and "it did not start" in capsys.readouterr().err
    assert "cpu.tiny.mini_x0.004.output_tok_s" in {figure["name"] for figure in found["figures"]}


def test_decoding_alone_is_the_rate_after_the_first_token() -> None:
    timed = TimedJob(
        ([[1] * 1024], [512]), [Round(2.5, 0), Round(2.6, 0), Round(2.7, 0)], [Round(0.1, 0), Round(0.045, 0)]
    )
    assert timed.decode_tok_s == pytest.approx(511 / (2.6 - 0.0725))
    assert timed.figure("bs1", "x").name == "x.decode_tok_s"


def test_every_target_is_a_figure_of_a_known_model() -> None:
    labels = {shape.label for shape in dummy_models.SHAPES.values()}
    for name in TARGETS:
        room, part = name.split(".")[:2]
        known = {
            "gpu": labels | {"idle_fraction", "http"},
            "pipeline": {*LINKS, "cost_model", "simulator", "meter"},
            "drafts": {"gpu", "cpu"},
            "models": labels | {"cpu", "lora"},
            "schemas": {
                *("accepted", "invalid_accepted", "valid_refused", "generated_valid"),
                *("compile", "mask_us_per_sequence", "rank_growth_mib", "natural"),
            },
        }
        assert part in known[room], name


@pytest.mark.parametrize("wrong", [["--workloads", "maxi"], ["--profile", "many"], ["--workloads", "bs1", "--http"]])
def test_a_wrong_command_line_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        gpu.main(wrong)
    assert refused.value.code == 2


def test_a_machine_without_a_gpu_is_not_given_a_model_of_8b(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "on_gpu", lambda settings: False)
    with pytest.raises(SystemExit) as refused:
        gpu.main([])
    assert refused.value.code == 2
    assert "--device cpu --model tiny" in capsys.readouterr().err
