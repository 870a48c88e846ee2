"""The trace of a request through the real server, with a real replica: its spans add up to what the client measures."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from router.metrics import otlp
from tests.otlp_receiver import Receiver, attributes, seconds
from tests.server.conftest import Whole, serving

ERROR = 0.02


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture(scope="module")
def traced(tiny_model: Path, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otlp, "BATCH_EVERY_S", 0.01)
        with serving(tmp_path_factory.mktemp("traced"), tiny_model, otlp_traces_endpoint=receiver.url) as whole:
            yield whole


@pytest.mark.slow
def test_spans_add_up_to_the_clients_time(traced: Whole, receiver: Receiver) -> None:
    """One after the other and some at once; each long enough for the client's own time not to count. A span that is
    missing, or counted twice, is so in each, so the one that other programs have disturbed least decides."""
    spent: dict[str, float] = {}

    async def ask(http: httpx.AsyncClient, name: str) -> None:
        body = {"model": "tiny-llama", "prompt": f"{name} {'x' * 64}", "max_tokens": 160, "ignore_eos": True}
        begun = time.perf_counter()
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=id_of(name)) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_bytes():
                pass
        spent[name] = time.perf_counter() - begun

    async def ask_all() -> None:
        async with httpx.AsyncClient(base_url=traced.url, timeout=60) as http:
            await ask(http, "warm-up")  # opens the connection, compiles
            for number in range(4):
                await ask(http, f"r{number}")
            await asyncio.gather(*(ask(http, f"r{number}") for number in range(4, 7)))

    def id_of(name: str) -> dict[str, str]:
        return {"X-Request-Id": name}

    asyncio.run(ask_all())
    spans = {attributes(span)["shoal.request_id"]: span for span in receiver.requests(8)}
    errors = {}
    for name in spent.keys() - {"warm-up"}:
        phases = receiver.children(spans[name])
        assert [phase.name for phase in phases] == ["router", "queue", "prefill", "decode", "answer"]
        errors[name] = abs(sum(map(seconds, phases)) - spent[name]) / spent[name]
    assert min(errors.values()) <= ERROR, errors
    traced.settled()


@pytest.mark.slow
def test_a_real_replicas_phases_are_all_told(traced: Whole, receiver: Receiver) -> None:
    before = len(receiver.requests(0))
    body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    answer = httpx.post(f"{traced.url}/v1/chat/completions", json=body, timeout=60).json()
    own = receiver.requests(before + 1)[-1]
    told = attributes(own)
    assert told["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert attributes(receiver.children(own)[1])["shoal.replica"] == "r0"
    traced.settled()
