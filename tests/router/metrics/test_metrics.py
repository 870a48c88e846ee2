"""What Prometheus is told."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.config import UpstreamConfig
from router.http.upstream import Upstream
from router.metrics.metrics import SAMPLES_A_PIECE, Metrics, values
from router.metrics.otlp import Tracer
from router.metrics.process import watch_loop
from worker.messages import ReplicaLoad

Make = Callable[..., Any]
HELLO = [{"role": "user", "content": "Hello"}]


def samples(stack: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = httpx.get(f"{stack.url}/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    return parsed(response.text)


def without_process(page: bytes) -> list[bytes]:
    """The lines that are the same each time."""
    return [line for line in page.splitlines() if not line.startswith((b"process_", b"python_"))]


def parsed(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_request_leaves_its_times(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)
    fake.allow(1)
    with stack.client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        next(stream)
        fake.allow(None)
        tokens = len(fake.script(fake.requests()[0]))
        list(stream)
    got = samples(stack)
    r0 = (("model", "tiny"), ("replica", "r0"))
    assert got["shoal_time_to_first_token_seconds_count", r0] == 1
    assert got["shoal_request_seconds_count", r0] == 1
    assert got["shoal_queue_seconds_sum", r0] == 0.25
    assert got["shoal_inter_token_latency_seconds_count", r0] == tokens - 1
    assert got["shoal_request_seconds_sum", r0] >= got["shoal_time_to_first_token_seconds_sum", r0] > 0
    assert got["shoal_sequences_total", (("finish_reason", "stop"), ("model", "tiny"))] == 1


def test_replicas_report_themselves(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(), make_replica())
    fake = stack.fakes["r1"]
    fake.tell(
        ReplicaLoad(
            incarnation="one",
            running=3,
            waiting=4,
            kv_tokens_total=1000,
            kv_tokens_used=300,
            kv_tokens_cached=200,
            preemptions=5,
            aborts=6,
            cached_tokens=70,
            prompt_tokens=80,
            output_tokens=90,
            proposals={"suffix": 3, "grammar": 1},
            drafted={"suffix": 9, "grammar": 4},
            accepted={"suffix": 5},
            stage_seconds=[{"compute": 7.5}, {"compute": 7.5, "host": 0.5}],
            length_tau=-0.25,
            length_ratio=1.5,
        )
    )
    stack.until(lambda: stack.service.metrics.loads["r1"].running == 3)
    got = samples(stack)
    expected = {
        "shoal_running_requests": 3,
        "shoal_waiting_requests": 4,
        "shoal_kv_tokens": 1000,
        "shoal_kv_tokens_used": 300,
        "shoal_kv_tokens_cached": 200,
        "shoal_preemptions_total": 5,
        "shoal_aborts_total": 6,
        "shoal_cached_tokens_total": 70,
        "shoal_prompt_tokens_total": 80,
        "shoal_output_tokens_total": 90,
        "shoal_output_length_tau": -0.25,
        "shoal_output_length_ratio": 1.5,
    }
    assert {name: got[name, (("model", "tiny"), ("replica", "r1"))] for name in expected} == expected
    assert got["shoal_running_requests", (("model", "tiny"), ("replica", "r0"))] == 0
    assert ("shoal_output_length_tau", (("model", "tiny"), ("replica", "r0"))) not in got, "nothing is known of r0's"
    r1 = (("model", "tiny"), ("replica", "r1"))
    assert got["shoal_proposals_total", (("drafter", "suffix"), *r1)] == 3
    assert got["shoal_drafted_tokens_total", (("drafter", "suffix"), *r1)] == 9
    assert got["shoal_accepted_tokens_total", (("drafter", "suffix"), *r1)] == 5
    spent = {labels[2:]: value for (name, labels), value in got.items() if name == "shoal_stage_seconds_total"}
    assert spent == {
        (("spent", "compute"), ("stage", "0")): 7.5,
        (("spent", "compute"), ("stage", "1")): 7.5,
        (("spent", "host"), ("stage", "1")): 0.5,
    }


def test_the_first_event_of_a_kind_is_an_increase() -> None:
    """Prometheus finds none in a counter whose first value is 1."""
    metrics = Metrics()
    metrics.model("tiny")
    Upstream("far", UpstreamConfig.model_validate({"url": "http://a/v1"}), metrics)
    Tracer("http://a", 1.0, metrics.trace_spans, "a", "1")
    counters = {
        metrics.taken_out: ("tiny", ["silent", "lost", "hung", "protocol", "error"]),
        metrics.resumed: ("tiny", ["replica_lost", "replica_left", "slow_reader"]),
        metrics.upstream_failures: ("far", ["unreachable", "timeout", "broken", "unauthorized"]),
    }
    for counter, (model, reasons) in counters.items():
        assert values(counter) == {(model, reason): 0 for reason in reasons}
    assert values(metrics.trace_spans) == {(result,): 0 for result in ("queue_full", "refused", "closed")}


def test_the_age_of_loads_is_told() -> None:
    now_s = 100.0
    metrics = Metrics(clock=lambda: now_s)
    model = metrics.model("tiny")

    def ages() -> dict[str, float]:
        page = parsed(metrics.page().decode())
        name = "shoal_replica_load_age_seconds"
        return {dict(labels)["replica"]: value for (metric, labels), value in page.items() if metric == name}

    model.told("r0", ReplicaLoad(incarnation="one"))
    now_s = 103.0
    model.told("r1", ReplicaLoad(incarnation="one"))
    now_s = 103.5
    assert ages() == {"r0": 3.5, "r1": 0.5}
    model.told("r0", ReplicaLoad(incarnation="one"))
    model.lost("r1")
    assert ages() == {"r0": 0.0}


def test_the_page_does_not_grow_with_replicas_that_are_gone(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica())
    address = stack.fakes["r0"].address
    stack.client.chat.completions.create(model="tiny", messages=HELLO)
    httpx.get(f"{stack.url}/metrics")
    before = len(samples(stack))
    for name in ("x", "y", "z"):
        stack.replicas.set_replicas({name: address})
        stack.ready(name)
        stack.client.chat.completions.create(model="tiny", messages=HELLO)
        got = samples(stack)
        assert {dict(labels)["replica"] for _, labels in got if "replica" in dict(labels)} == {name}
    assert len(samples(stack)) == before


def test_answers_are_counted_by_route(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica())
    for path in ("/v1/models/a", "/v1/models/b", "/nowhere/1", "/nowhere/2"):
        httpx.get(stack.url + path)
    got = samples(stack)
    for path in ("/v1/models/{model_id:path}", "unknown"):
        assert got["shoal_http_responses_total", (("model", ""), ("path", path), ("status", "404"))] == 2


def test_an_answer_that_nobody_expected_is_counted(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica())
    stack.service.tokenizer = None
    assert httpx.post(f"{stack.url}/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 500
    labels = (("model", "tiny"), ("path", "/v1/completions"), ("status", "500"))
    assert samples(stack)["shoal_http_responses_total", labels] == 1


def test_a_sequence_that_ends_in_a_mistake_of_ours_has_failed(
    make_stack: Make, make_replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(make_replica())
    monkeypatch.setattr("router.generation.OutputText.push", None)
    assert httpx.post(f"{stack.url}/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 500
    got = samples(stack)
    assert {labels: value for (name, labels), value in got.items() if name == "shoal_sequences_total"} == {
        (("finish_reason", "failed"), ("model", "tiny")): 1
    }


def test_several_routers_count_under_their_names() -> None:
    """And tell what replicas report as one would."""
    pages = []
    for router in ("a", "b"):
        metrics = Metrics(router=router)
        model = metrics.model("tiny")
        model.loads["r0"] = ReplicaLoad(incarnation="one", output_tokens=90, stage_seconds=[{"compute": 1.0}])
        model.replica("r0").first_token.observe(0.2)
        model.ended("stop")
        pages.append(parsed(metrics.page().decode()).keys())
    both, own = pages[0] & pages[1], pages[0] - pages[1]
    histograms = {name.rpartition("_")[0] for name, _ in own if name.startswith("shoal_") and name.endswith("_count")}
    times = ("time_to_first_token", "inter_token_latency", "request", "queue", "prefill", "decode", "placement")
    assert histograms == {
        *(f"shoal_{of}_seconds" for of in (*times, "event_loop_lag")),
        *(f"shoal_request_{of}_tokens" for of in ("prompt", "output")),
    }
    others = {name for name, _ in own if not re.search("_(count|sum|bucket)$", name)}
    assert {name for name in others if name.startswith("shoal_")} == {
        "shoal_build_info",
        "shoal_sequences_total",
        "shoal_resumed_sequences_total",
        "shoal_replicas_taken_out_total",
        "shoal_key_file_errors_total",
        "shoal_expected_cached_tokens_total",
        "shoal_found_cached_tokens_total",
    }
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "vllm:request_success_total"} <= others
    assert all(("router", "a") in labels for _, labels in own)
    assert ("shoal_output_tokens_total", (("model", "tiny"), ("replica", "r0"))) in both
    assert ("shoal_replicas_wanted", (("model", "tiny"),)) in both
    assert not any("router" in dict(labels) for _, labels in both)


def test_the_page_comes_in_small_pieces() -> None:
    """However many replicas there are; and each family has one head."""
    metrics = Metrics(router="a")
    model = metrics.model("tiny")
    for number in range(40):
        model.replica(f"r{number}").inter_token.observe(0.02)
        stages = [{"compute": 1.0, "host": 2.0}] * 4
        model.loads[f"r{number}"] = ReplicaLoad(incarnation="one", running=number, stage_seconds=stages)
    pieces = list(metrics.pieces())
    assert max(piece.count(b"\n") for piece in pieces) <= SAMPLES_A_PIECE + 2
    page = b"".join(pieces)
    assert without_process(page) == without_process(metrics.page())
    heads = [line for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    got = parsed(page.decode())
    assert sum(value for (name, _), value in got.items() if name == "shoal_inter_token_latency_seconds_count") == 40
    assert sum(value for (name, _), value in got.items() if name == "shoal_running_requests") == sum(range(40))
    assert sum(name == "shoal_stage_seconds_total" for name, _ in got) == 40 * 8


def test_lengths_and_phases_of_a_request(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica())
    answer = stack.client.chat.completions.create(model="tiny", messages=HELLO)
    got = samples(stack)
    r0 = (("model", "tiny"), ("replica", "r0"))
    assert got["shoal_request_prompt_tokens_sum", r0] == answer.usage.prompt_tokens
    assert got["shoal_request_output_tokens_sum", r0] == answer.usage.completion_tokens
    for name in ("prefill_seconds", "decode_seconds", "request_prompt_tokens", "request_output_tokens"):
        assert got[f"shoal_{name}_count", r0] == 1
    spent = got["shoal_decode_seconds_sum", r0]
    assert 0 <= spent <= got["shoal_request_seconds_sum", r0]
    assert got["shoal_placement_seconds_count", (("model", "tiny"),)] == 1
    assert got["shoal_expected_cached_tokens_total", (("model", "tiny"),)] == 0
    assert got["shoal_found_cached_tokens_total", (("model", "tiny"),)] == 3


def test_a_resumed_request_counts_its_lengths_once(make_stack: Make, make_replica: Make) -> None:
    fakes = [make_replica().hold(), make_replica().hold()]
    stack = make_stack(*fakes)
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    with stack.raw("/v1/chat/completions", body) as connection:
        _, second = stack.lose_one()
        stack.read_until(connection, b"[DONE]")
    whole = stack.fakes[second].script(None)
    assert stack.metric("shoal_request_prompt_tokens_count") == 1
    assert stack.metric("shoal_request_output_tokens_sum") == len(whole)
    assert stack.metric("shoal_prefill_seconds_count") == 2


def test_what_a_replica_tells_of_its_cache_and_steps() -> None:
    metrics = Metrics()
    load = ReplicaLoad(
        incarnation="one",
        kv_tokens_total=1600,
        kv_tokens_used=400,
        kv_tokens_evicted=32,
        page_size=16,
        step_tokens=[0, 3, 0, 1, *[0] * 12],
        computed_tokens=14,
    )
    metrics.model("tiny").told("r0", load)
    metrics.model("tiny").told("old", ReplicaLoad(incarnation="one"))  # of a version that does not tell
    got = parsed(metrics.page().decode())
    r0 = (("model", "tiny"), ("replica", "r0"))
    assert got["shoal_kv_usage_ratio", r0] == 0.25 and got["shoal_kv_tokens_evicted_total", r0] == 32
    assert got["shoal_kv_config_info", (*r0[:1], ("page_size", "16"), ("pages", "100"), *r0[1:])] == 1
    assert got["shoal_step_tokens_count", r0] == 4 and got["shoal_step_tokens_sum", r0] == 14
    bounds = {dict(labels)["le"]: value for (name, labels), value in got.items() if name == "shoal_step_tokens_bucket"}
    assert (bounds["1"], bounds["2"], bounds["4"], bounds["8"], bounds["+Inf"]) == (0, 3, 3, 4, 4)
    old = (("model", "tiny"), ("replica", "old"))
    assert not [name for name, labels in got if labels == old and name.startswith(("shoal_kv_usage", "shoal_step_t"))]


def test_a_routers_process_is_told() -> None:
    got = parsed(Metrics("a").page().decode())
    mine = (("router", "a"),)
    assert got["process_resident_memory_bytes", mine] > 1e6 and got["process_open_fds", mine] > 0
    assert got["process_cpu_seconds_total", mine] > 0
    assert ("python_gc_collections_total", (("generation", "2"), ("router", "a"))) in got
    (build,) = [dict(labels) for name, labels in got if name == "shoal_build_info"]
    assert build["router"] == "a" and build["python"].startswith("3.") and int(build["protocol"]) > 0


def test_a_late_event_loop_is_told() -> None:
    late: list[float] = []

    async def run() -> None:
        watching = asyncio.create_task(watch_loop(late.append, 0.001))
        await asyncio.sleep(0)
        time.sleep(0.05)  # what no loop should do
        while not late:
            await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(run())
    assert late[0] > 0.03
