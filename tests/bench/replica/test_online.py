"""A server under load as a user starts it, and the same of another checkout, beside each other."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.replica import online

Fake = Any  # of conftest.py


@pytest.fixture
def started(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], Path | None]]:
    """`server` gives the fake one; returns what it was started with."""
    arguments: list[tuple[Sequence[str], Path | None]] = []

    @contextlib.contextmanager
    def server(given: Sequence[str], checkout: Path | None = None) -> Iterator[str]:
        arguments.append((given, checkout))
        yield fake.url

    monkeypatch.setattr(online, "server", server)
    monkeypatch.setattr(online, "_stage_seconds", lambda url: {"compute": 1.0})
    monkeypatch.setattr(online, "WARM_S", 0.1)
    return arguments


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    assert online.main(["--shape", "tiny", "--out", str(tmp_path), "--name", "n", *arguments]) == 0
    return json.loads((tmp_path / "n.json").read_text())


@pytest.mark.bench
def test_both_checkouts_get_the_same_loads(fake: Fake, started: list[Any], tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "5,3\n" * 400)
    loads = ("--loads", f"online={trace}@20,long@40", "--requests", "4", "--burst", "8", "--before", str(tmp_path))
    found = run(tmp_path, *loads, "--tbt-slo", "1")
    (before, where), (now, here) = started
    assert where == tmp_path and here is None
    assert [*before, "--tbt-slo", "1.0"] == now
    names = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert {f"n.{load}.{kind}" for load in ("online", "long") for kind in online.FIGURES} <= names.keys()
    assert {"n.burst.output_tok_s", "n.burst.vs_before", "n.long.ttft_p99.vs_before"} <= names.keys()
    measured = found["loads"]
    ratio = measured["now"]["online"]["ttft_s"]["p50"] / measured["before"]["online"]["ttft_s"]["p50"]
    assert names["n.online.ttft_p50.vs_before"] == pytest.approx(ratio)
    assert measured["now"]["burst"]["requests"] == 8 and measured["before"]["long"]["requests"] == 4


@pytest.mark.bench
def test_a_failure_fails_the_measurement(
    fake: Fake, started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.faults = dict.fromkeys(range(10, 100), "overloaded")  # after a probe, 8 requests to warm up, and another probe
    line = ["--shape", "tiny", "--out", str(tmp_path), "--burst", "0", "--loads", "a@80", "--requests", "8"]
    assert online.main(line) == 1
    assert "requests failed" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("loads", ["online", "a b@3", "online@-1", "online=x.csv@"])
def test_a_load_that_is_none_is_refused(loads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        online.main(["--loads", loads])
    assert "--loads" in capsys.readouterr().err
