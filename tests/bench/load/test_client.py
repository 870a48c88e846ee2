"""A stream becomes a sample: its times, its counts, and what went wrong with it."""

import asyncio
import json
import time
from typing import Any

import pytest

from bench.load.client import Abilities, Endpoint, Reader, ask, probe
from bench.load.http import Http
from bench.load.metrics import Sample

Fake = Any  # of conftest.py


def read(events: list[dict[str, Any] | str], status: int = 200) -> Sample:
    """The sample of a stream whose n-th event (from 1) comes after n seconds."""
    sample = Sample(due_s=0, asked_tokens=3)
    reader = Reader(sample, start=100.0)
    for n, event in enumerate(events, 1):
        data = event if isinstance(event, str) else json.dumps(event)
        reader.data(f"data: {data}\n\n".encode(), status, 100.0 + n)
    reader.end(status)
    return sample


def text(value: str, tokens: int | None = None, **choice: Any) -> dict[str, Any]:
    chunk: dict[str, Any] = {"choices": [{"text": value, **choice}]}
    return chunk if tokens is None else {**chunk, "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}


def test_chunks_with_output_are_timed_and_usage_is_believed() -> None:
    sample = read([text("a"), text("b"), text("", finish_reason="length"), {"choices": [], "usage": USAGE}, "[DONE]"])
    assert (sample.chunk_s, sample.chunk_tokens, sample.text) == ([1.0, 2.0], [], "ab")
    assert (sample.prompt_tokens, sample.output_tokens, sample.cached_tokens) == (5, 4, 2)
    assert (sample.finish_reason, sample.error) == ("length", None)


def test_tokens_are_counted_in_every_chunk_where_the_server_does() -> None:
    stream = [text("a", 1), text("bc", 3), text("", 4, finish_reason="stop"), {"choices": [], "usage": USAGE}, "[DONE]"]
    sample = read(stream)
    assert (sample.chunk_s, sample.chunk_tokens, sample.output_tokens) == ([1.0, 2.0, 3.0], [1, 2, 1], 4)


def test_a_role_is_no_token_and_reasoning_is() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": {"completion_tokens": 0}}
    thought = {"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]}
    sample = read([role, thought, {"choices": [{"delta": {"content": "so"}}]}, "[DONE]"])
    assert (sample.chunk_s, sample.text, sample.output_tokens) == ([2.0, 3.0], "hmso", 2)


def test_without_usage_tokens_are_chunks() -> None:
    sample = read([text("a"), text("b"), "[DONE]"])
    assert (sample.output_tokens, sample.prompt_tokens, sample.cached_tokens) == (2, None, None)


@pytest.mark.parametrize(
    ("events", "status", "error", "message"),
    [
        ([text("a"), {"error": {"message": "out of luck"}}], 200, "stream_error", "out of luck"),
        ([text("a"), "{nonsense"], 200, "invalid_chunk", "{nonsense"),
        ([text("a"), '{"choices": 3}'], 200, "invalid_chunk", "choices"),
        ([text("a")], 200, "cut_off", "[DONE]"),
        (["[DONE]"], 200, "empty", "no output"),
    ],
)
def test_what_goes_wrong_in_a_stream(events: list, status: int, error: str, message: str) -> None:
    sample = read(events, status)
    assert sample.error == error and message in sample.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "slow down"}}', "slow down"),
        (b'{"error": "short"}', "short"),
        (b'{"detail": ["x"]}', '{"detail": ["x"]}'),
        (b"<html>", "<html>"),
    ],
)
def test_a_refusal_has_its_status_and_message(body: bytes, message: str) -> None:
    sample = Sample(due_s=0, asked_tokens=1)
    reader = Reader(sample, 0.0)
    reader.data(body[:3], 429, 1.0)
    reader.data(body[3:], 429, 1.0)
    reader.end(429)
    assert (sample.error, sample.message) == ("http_429", message)


# ---------------------------------------------------------------- against a server


def asked(fake: Fake, chat: bool = False, timeout_s: float = 30.0, extra: dict[str, Any] | None = None) -> Sample:
    async def run() -> Sample:
        http, sample = Http(fake.url), Sample(due_s=0, asked_tokens=3)
        endpoint = Endpoint(chat, "fake", extra or {})
        prompt: Any = [{"role": "user", "content": "a b"}] if chat else [1, 2]
        await ask(http, endpoint.path, endpoint.body(prompt, 3), sample, time.perf_counter(), timeout_s)
        http.close()
        return sample

    return asyncio.run(run())


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer(fake: Fake, chat: bool) -> None:
    sample = asked(fake, chat, extra={"priority": 1})
    assert (sample.error, sample.text, sample.output_tokens, sample.cached_tokens) == (None, " w0 w1 w2", 3, 3)
    assert sample.prompt_tokens == 2 and sample.chunk_tokens == [1, 1, 1]
    assert 0 <= sample.sent_s <= sample.chunk_s[0] <= sample.chunk_s[-1] <= sample.end_s
    assert fake.bodies[0]["priority"] == 1 and fake.bodies[0]["ignore_eos"] and fake.bodies[0]["stream"]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("overloaded", "http_429"),
        ("broken", "http_502"),
        ("hangs up", "disconnected"),
        ("error", "stream_error"),
        ("nonsense", "invalid_chunk"),
        ("cut off", "cut_off"),
    ],
)
def test_faults_have_their_kind(fake: Fake, fault: str, error: str) -> None:
    fake.faults = {0: fault}
    sample = asked(fake)
    assert sample.error == error and sample.message and sample.end_s > 0


def test_a_server_that_hangs_is_given_up(fake: Fake) -> None:
    fake.faults = {0: "hangs"}
    sample = asked(fake, timeout_s=0.2)
    assert sample.error == "timeout" and "0.2 s" in sample.message


def test_nobody_there(fake: Fake) -> None:
    fake.url = "http://127.0.0.1:1"  # a port that takes root to listen on
    assert asked(fake).error == "connect"


@pytest.mark.parametrize(
    ("takes", "chat", "text_only", "abilities", "refusals"),
    [
        ({}, False, False, Abilities(), 0),
        ({"chunk_usage": False}, False, False, Abilities(chunk_usage=False), 1),
        ({"ignore_eos": False}, False, False, Abilities(ignore_eos=False), 1),
        ({"ids": False}, False, False, Abilities(prompt_ids=False), 1),
        ({"ids": False, "ignore_eos": False, "chunk_usage": False}, False, False, Abilities(False, False, False), 3),
        ({}, True, False, Abilities(prompt_ids=False), 0),
        ({}, False, True, Abilities(prompt_ids=False), 0),
    ],
)
def test_probing_finds_what_a_server_takes(
    fake: Fake, takes: dict, chat: bool, text_only: bool, abilities: Abilities, refusals: int
) -> None:
    for name, value in takes.items():
        setattr(fake, name, value)

    async def run() -> tuple[Endpoint, Sample, list[str]]:
        http = Http(fake.url)
        found = await probe(http, Endpoint(chat, "fake", {}), 7, 30.0, text_only)
        http.close()
        return found

    endpoint, last, said = asyncio.run(run())
    assert endpoint.abilities == abilities and last.error is None and len(said) == refusals
    assert fake.bodies[0].get("prompt") == ([7] if abilities.prompt_ids else None if chat else " time")


def test_probing_a_server_that_refuses_everything_tells_why(fake: Fake) -> None:
    fake.faults = {0: "broken"}

    async def run() -> Sample:
        http = Http(fake.url)
        sample = (await probe(http, Endpoint(False, "fake", {}), 7, 30.0))[1]
        http.close()
        return sample

    assert asyncio.run(run()).error == "http_502"
