"""The line of the log about a request: its id, tokens and times, and nothing of what was said."""

import json
import logging
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config import RouterConfig
from router.metrics import request_log
from router.wire import request_id
from worker.messages import Failure

Make = Callable[..., Any]
SECRET = "my secret is 12345"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}
MINE = {request_id.HEADER: "mine"}


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "router.metrics.request_log"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_has_one_line(stack: Any, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    with caplog.at_level(logging.INFO, "router"):
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT | {"stream": stream}, headers=MINE)
        assert answer.status_code == 200
        stack.until(lambda: told(caplog))  # it is written when the answer has ended
    (line,) = told(caplog)
    assert line.levelname == "INFO" and "mine" in line.getMessage()
    (request,) = stack.fakes["r0"].requests()
    fields = vars(line)
    assert fields["request_id"] == "mine" and fields["model"] == "tiny" and fields["replica"] == "r0"
    assert "client" not in fields  # there are no keys
    assert fields["prompt_tokens"] == len(request.prompt_ids) and fields["cached_tokens"] == 3
    assert fields["output_tokens"] == len(stack.fakes["r0"].script(request))
    assert fields["finish_reason"] == "stop" and fields["queue_s"] == 0.25
    assert 0 < fields["first_token_s"] <= fields["total_s"] < 20 and "resumed" not in fields
    everything = json.dumps([vars(record) for record in caplog.records], default=str)
    assert "secret" not in everything and "12345" not in everything


def test_choices_are_told_together(
    make_stack: Make, make_replica: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("keys: [{key: a-key-of-alices, name: alice}]")
    stack = make_stack(make_replica(), config=RouterConfig(api_key_file=keys))
    headers = {"Authorization": "Bearer a-key-of-alices"}
    body = {"model": "tiny", "prompt": "a b c", "n": 3, "max_tokens": 2, "seed": 1}
    with caplog.at_level(logging.INFO, "router.metrics.request_log"):
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers).json()
        stack.until(lambda: told(caplog))
    (line,) = told(caplog)
    fields, usage = vars(line), answer["usage"]
    assert (fields["prompt_tokens"], fields["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert fields["finish_reason"] == "length" and fields["cached_tokens"] == 3 and fields["client"] == "alice"


def test_a_resumed_stream_is_told_with_both_replicas(
    make_stack: Make, make_replica: Make, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = [make_replica().hold(), make_replica().hold()]
    stack = make_stack(*fakes)
    with caplog.at_level(logging.INFO, "router"), stack.raw("/v1/chat/completions", CHAT | {"stream": True}):
        first, second = stack.lose_one()
        stack.until(lambda: told(caplog))
    (line,) = told(caplog)
    assert vars(line)["resumed"] == 1 and vars(line)["replica"] == f"{first},{second}" and vars(line)["queue_s"] == 0.25
    (goes_on,) = [record for record in caplog.records if record.name == "router.service"]
    assert goes_on.levelname == "WARNING" and vars(goes_on)["replica"] == first
    assert request_id.of_sequence(vars(goes_on)["sequence"]) == vars(line)["request_id"]


def test_an_abandoned_request_has_a_line(
    make_stack: Make, make_replica: Make, caplog: pytest.LogCaptureFixture
) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)
    with caplog.at_level(logging.INFO, "router.metrics.request_log"):
        with stack.raw("/v1/chat/completions", CHAT | {"stream": True}) as client:
            fake.wait_for(fake.requests)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
        stack.until(lambda: told(caplog))
    (line,) = told(caplog)
    assert vars(line)["finish_reason"] == "abandoned" and vars(line)["output_tokens"] == 0


def test_requests_that_reach_no_replica_have_no_line(stack: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "router"):
        assert httpx.post(f"{stack.url}/v1/chat/completions", json={}).status_code == 400
        assert httpx.get(f"{stack.url}/metrics").status_code == 200
        assert httpx.post(f"{stack.url}/tokenize", json={"model": "tiny", "prompt": SECRET}).status_code == 200
    assert caplog.records == []


def test_a_refusal_has_the_fields_too(make_stack: Make, make_replica: Make, caplog: pytest.LogCaptureFixture) -> None:
    fake = make_replica()
    fake.fail(Failure("overloaded", "the queue is full", retry_after_s=3.0))
    stack = make_stack(fake)
    with caplog.at_level(logging.INFO, "router"):
        assert httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT, headers=MINE).status_code == 429
        stack.until(lambda: caplog.records)  # written when the answer has ended
    (line,) = caplog.records
    fields = vars(line)
    assert (fields["request_id"], fields["status"], fields["model"], fields["replica"]) == ("mine", 429, "tiny", "r0")


def test_a_response_in_the_background_is_told_at_its_end(
    make_stack: Make, make_replica: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake, config=RouterConfig(response_store_dir=tmp_path))
    body = {"model": "tiny", "input": SECRET, "background": True}
    with caplog.at_level(logging.INFO, "router.metrics.request_log"):
        assert httpx.post(f"{stack.url}/v1/responses", json=body, headers=MINE).status_code == 200
        fake.wait_for(fake.requests)
        assert told(caplog) == []
        fake.allow(None)
        stack.until(lambda: told(caplog))
    (line,) = told(caplog)
    assert vars(line)["request_id"] == "mine" and vars(line)["finish_reason"] == "stop"


def test_requests_do_not_mix(make_stack: Make, make_replica: Make, caplog: pytest.LogCaptureFixture) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)
    with (
        caplog.at_level(logging.INFO, "router.metrics.request_log"),
        stack.raw("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1}),
        stack.raw("/v1/completions", {"model": "tiny", "prompt": "a b c d e f", "max_tokens": 2}),
    ):
        fake.wait_for(lambda: len(fake.requests()) == 2)
        fake.allow(None)
        stack.until(lambda: len(told(caplog)) == 2)
    lines = sorted((vars(line)["output_tokens"], vars(line)["prompt_tokens"]) for line in told(caplog))
    wanted = sorted((request.sampling.max_tokens, len(request.prompt_ids)) for request in fake.requests())
    assert lines == wanted and request_log.current() is None
