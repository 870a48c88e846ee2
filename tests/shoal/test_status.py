"""The status is what the router's own page says."""

import io
import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from starlette.responses import JSONResponse, PlainTextResponse

from router.metrics.metrics import Metrics
from shoal import status
from shoal.client import ServerError
from shoal.status import DrafterStatus, ModelStatus, ReplicaStatus, Status, render, replicas, total
from worker.messages import ReplicaLoad

Fake = Any  # of conftest.py
Captured = pytest.CaptureFixture[str]


def page() -> bytes:
    loads = {
        "b": ReplicaLoad(
            incarnation="x", running=3, waiting=2, kv_tokens_total=1000, kv_tokens_used=250, kv_tokens_cached=500
        ),
        "a": ReplicaLoad(incarnation="y", prompt_tokens=400, cached_tokens=100, output_tokens=70, finished=5),
    }
    loads["a"].proposals, loads["b"].proposals = {"suffix": 10, "grammar": 2}, {"suffix": 30}
    loads["a"].drafted, loads["b"].drafted = {"suffix": 40, "grammar": 8}, {"suffix": 60}
    loads["a"].accepted, loads["b"].accepted = {"suffix": 30, "grammar": 8}, {"suffix": 20}
    metrics = Metrics()
    model = metrics.model("m")
    model.wanted.set(3)
    model.loads.update(loads)
    model.attention.update(a=("triton", "FlashInfer is not installed"), b=("flashinfer", ""), gone=("torch", ""))
    model.replica("a").first_token.observe(0.2)
    model.replica("a").first_token.observe(0.4)
    model.replica("a").inter_token.observe(0.05)
    model.replica("lost").first_token.observe(0.3)  # it answered, and does not report any more
    return metrics.page()


def test_every_metric_that_is_read_is_one_that_the_router_writes() -> None:
    written = page().decode()
    for metric in (*status.METRICS.values(), *status.DRAFTS.values()):
        assert f"\n{metric}{{" in written, metric
    for metric in (status.READY, status.WANTED):
        assert f"\n{metric}{{" in written, metric
    assert f"\n{status.ATTENTION}{{" in written


def test_replicas_of_a_page() -> None:
    (a, b), models = replicas(page().decode())
    assert models == [ModelStatus("m", 2, 3)] and a.model == b.model == "m"
    assert (a.name, a.prompt_tokens, a.cached_tokens, a.output_tokens, a.finished) == ("a", 400, 100, 70, 5)
    assert (a.ttft_count, a.tbt_count) == (2, 1) and a.ttft_sum_s == pytest.approx(0.6)
    assert (b.running, b.waiting, b.kv_tokens, b.kv_tokens_used, b.kv_tokens_cached) == (3, 2, 1000, 250, 500)
    assert b.drafters == {"suffix": DrafterStatus(30, 60, 20)} and a.drafters["grammar"] == DrafterStatus(2, 8, 8)
    assert (a.attention, a.attention_problem) == ("triton", "FlashInfer is not installed")
    assert (b.attention, b.attention_problem) == ("flashinfer", "")
    assert replicas('# HELP other x\n# TYPE other gauge\nother{replica="z"} 1\n') == ([], [])
    with pytest.raises(ServerError, match="Prometheus"):
        replicas("<html>")


def shown(value: Status) -> str:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(render(value))
    return out.getvalue()


def test_the_table() -> None:
    found, models = replicas(page().decode())
    text = shown(Status("http://x", None, ["m"], found, models))
    whole = [ModelStatus("m", 2, 2)]
    assert "2 of 3 replicas" in text and " of " not in shown(Status("http://x", None, ["m"], found, whole))
    assert "ready" in text and "25%" in text and "300 ms" in text and "50 ms" in text
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()[:-1]]
    assert rows[-4:] == [
        [],
        ["drafter", "drafted", "accepted", "tokens", "a", "step"],
        ["suffix", "100", "50%", "2.25"],
        ["grammar", "8", "100%", "5.00"],
    ]
    assert [row[0] for row in rows[-7:-4]] == ["a", "b", "all"]
    assert text.splitlines()[-1] == "FlashInfer is not installed"
    assert total(found).running == 3 and total(found).prompt_tokens == 400
    assert "no replica" in shown(Status("http://x", "not ready", ["m"], []))
    assert "all" not in shown(Status("http://x", None, ["m"], [ReplicaStatus("one")])).split()


def test_the_table_of_several_models() -> None:
    metrics = Metrics()
    for name, wanted, loads in (("small", 2, "ba"), ("large", 1, ""), ("third", 1, "c")):
        metrics.model(name).wanted.set(wanted)
        metrics.model(name).loads.update({replica: ReplicaLoad(incarnation=replica) for replica in loads})
    found, models = replicas(metrics.page().decode())
    assert models == [ModelStatus("small", 2, 2), ModelStatus("large", 0, 1), ModelStatus("third", 1, 1)]
    text = shown(Status("http://x", None, ["small", "large", "third", "other"], found, models))
    assert "small, large, third, other" in text and "0 of 1 replicas of large" in " ".join(text.split())
    rows = [line.split()[:2] for line in text.splitlines()[-4:]]
    assert rows == [["small", "a"], ["small", "b"], ["third", "c"], ["all", "0"]] and "…" not in text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (12345, "12.3k"), (999_999, "1M"), (4.56e9, "4.56G")]
)
def test_counts_are_short(count: float, text: str) -> None:
    assert status.compact(count) == text


def test_a_server_that_is_ready(fake: Fake, capsys: Captured) -> None:
    fake.metrics = page()
    assert status.main(["--url", fake.url]) == 0
    assert "fake, other" in capsys.readouterr().out
    assert status.main(["--url", fake.url, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["problem"] is None and [replica["name"] for replica in value["replicas"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("ready", "says"),
    [
        (JSONResponse({"error": {"message": "no replica yet"}}, 503), "not ready: no replica yet"),
        (JSONResponse({"status": "not ready", "replicas": 0}, 503), "not ready: no replica"),
        (PlainTextResponse("", 503), "not ready"),
        (PlainTextResponse("what?", 404), "not Shoal's"),
    ],
)
def test_a_server_that_is_not(fake: Fake, ready: Any, says: str, capsys: Captured) -> None:
    fake.ready = ready
    assert status.main(["--url", fake.url]) == 1
    assert says in " ".join(capsys.readouterr().out.split())


def test_a_watch_ends_with_ctrl_c(fake: Fake, in_terminal: Callable[..., Any]) -> None:
    terminal = in_terminal("status", "--url", fake.url, "--watch", "0.05")
    modes = terminal.modes
    terminal.wait_for("fake, other")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0 and "Traceback" not in terminal.shown
    assert terminal.modes == modes and terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")


def test_no_server_and_no_key(fake: Fake, capsys: Captured) -> None:
    assert status.main(["--url", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1;" in capsys.readouterr().err
    fake.api_key = "sesame"
    assert status.main(["--url", fake.url]) == 1
    assert "--api-key" in capsys.readouterr().err
    assert status.main(["--url", fake.url, "--api-key", "sesame"]) == 0
