"""SmolLM2-135M-Instruct in float32 behind `shoal serve`: HTTP, Ray Serve, the router and two replicas change no token
of what `transformers` generates, however requests come and whatever runs beside them.
"""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from router.text.tokenizer import Tokenizer
from tests.conftest import NAME, NEW_TOKENS, Reference

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PAGE = 16
START_S = 150.0
END_S = 30.0
WAIT_S = 120.0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


# ---------------------------------------------------------------- a server of two replicas


@pytest.fixture(scope="module")
def url(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of `shoal serve`, in a process of its own. At the end nothing is left of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    flags = ["--replicas", "2", "--port", port, "--dtype", "float32", "--device", "cpu", "--kv-tokens", "16384"]
    command = [sys.executable, "-m", "shoal.cli", "serve", "--model", NAME, "--dequantize", *flags]
    with (tmp_path_factory.mktemp("serve") / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _until_ready(process, Path(log.name))
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) > 4
            yield f"http://127.0.0.1:{port}"
            process.send_signal(signal.SIGINT)
            assert process.wait(END_S) == 0, Path(log.name).read_text()
            assert not psutil.wait_procs(family, timeout=1)[1], "Ctrl-C left processes behind"
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Also of one that does not want to."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)
    for child in psutil.wait_procs(family, timeout=1)[1]:
        child.kill()


def _until_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while "Ctrl-C" not in log.read_text():
        assert process.poll() is None, f"shoal serve ended:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"not ready within {START_S} s:\n{log.read_text()}"
        threading.Event().wait(0.1)  # it is another process's doing


# ---------------------------------------------------------------- what is asked, and what came


@dataclass
class Answer:
    """One choice: its text, the tokens' texts where log probabilities were asked for, and the request's usage."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Any = None

    @property
    def cached_tokens(self) -> int:
        return int(self.usage.prompt_tokens_details.cached_tokens)


@dataclass(frozen=True)
class Asker:
    """Asks one server about one model."""

    client: AsyncOpenAI
    model: str

    async def complete(self, prompt: list[int] | str, stream: bool, n: int = 1, **options: Any) -> list[Answer]:
        settings = {"model": self.model, "prompt": prompt, "n": n, "temperature": 0, "max_tokens": NEW_TOKENS} | options
        answers = [Answer() for _ in range(n)]
        if not stream:
            whole = await self.client.completions.create(**settings)
            for choice in whole.choices:
                tokens = choice.logprobs.tokens if choice.logprobs else []
                answers[choice.index] = Answer(choice.text, tokens, choice.finish_reason, whole.usage)
            return answers
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await self.client.completions.create(**settings, **options):
            for choice in chunk.choices:
                answer = answers[choice.index]
                answer.text += choice.text
                answer.tokens += choice.logprobs.tokens if choice.logprobs else []
                answer.finish_reason = choice.finish_reason
            if chunk.usage:
                for answer in answers:
                    answer.usage = chunk.usage
        return answers

    async def chat(self, messages: list[dict[str, str]], stream: bool) -> list[Answer]:
        settings = {"model": self.model, "messages": messages, "temperature": 0, "max_completion_tokens": NEW_TOKENS}
        settings |= {"logprobs": True}
        answer = Answer()
        if not stream:
            whole = await self.client.chat.completions.create(**settings)
            choice = whole.choices[0]
            tokens = [token.token for token in choice.logprobs.content]
            return [Answer(choice.message.content, tokens, choice.finish_reason, whole.usage)]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await self.client.chat.completions.create(**settings, **options):
            for choice in chunk.choices:
                answer.text += choice.delta.content or ""
                answer.tokens += [token.token for token in choice.logprobs.content] if choice.logprobs else []
                answer.finish_reason = choice.finish_reason
            answer.usage = chunk.usage or answer.usage
        return [answer]

    async def beside(self) -> list[str]:
        """Texts of requests that are drawn under seeds, and of one under a schema."""
        asks: list[Any] = []
        for seed in range(4):
            drawn = {"temperature": 1.0, "seed": seed, "top_p": 0.95, "presence_penalty": 0.5 * (seed % 2)}
            asks.append(self.complete("The lighthouse keeper", stream=seed % 2 == 0, n=1 + seed // 3, **drawn))
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        prompt = "A person called Ada, who is 36 years old, as JSON: "
        asks.append(self.complete(prompt, stream=False, max_tokens=80, extra_body={"response_format": form}))
        texts = [answer.text for answers in await asyncio.gather(*asks) for answer in answers]
        person = json.loads(texts[-1])
        assert person.keys() == {"name", "age"} and len(person["name"]) <= 8 and 0 <= person["age"] <= 99
        return texts


def chosen(reference: Reference) -> list[int]:
    """Every second prompt, and the longest."""
    return [*range(0, len(reference.prompts), 2), len(reference.prompts) - 1]


async def _everything(url: str, reference: Reference, warm: bool) -> tuple[list[list[Answer]], list[str]]:
    """All at once: the chosen prompts as token ids, streamed or not, some for two answers; all chats; and what is
    beside them. When `warm`, what was streamed is not, and the other way round."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        ask = Asker(client, reference.folder.name)
        asks: list[Any] = []
        for place, number in enumerate(chosen(reference)):
            n = 2 if place % 8 == 3 else 1
            prompt = reference.prompts[number]
            asks.append(ask.complete(prompt, stream=(place % 2 == 0) != warm, n=n, logprobs=place % 3))
        for number, messages in enumerate(reference.chats):
            asks.append(ask.chat(messages, stream=(number % 2 == 0) != warm))
        beside = asyncio.ensure_future(ask.beside())
        return await asyncio.gather(*asks), await beside


# ---------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def rounds(url: str, reference: Reference) -> list[tuple[list[list[Answer]], list[str]]]:
    """Everything, cold and then warm."""
    assert reference.said  # before the clock of any request runs
    return [asyncio.run(_everything(url, reference, warm)) for warm in (False, True)]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_every_token_is_what_transformers_generates(rounds: Any, reference: Reference, warm: bool) -> None:
    tokenizer = Tokenizer.from_folder(reference.folder)
    expected = [*chosen(reference), *(reference.first_chat + i for i in range(len(reference.chats)))]
    answers, _ = rounds[warm]
    assert len(answers) == len(expected)
    for number, choices in zip(expected, answers, strict=True):
        said = reference.said[number]
        for choice in choices:
            assert choice.tokens == [tokenizer.token_text(token_id) for token_id in said], number
            assert choice.text == tokenizer.decode(said), number
            assert choice.finish_reason == ("stop" if said[-1] in tokenizer.special_ids else "length")
        usage = choices[0].usage
        assert usage.prompt_tokens == len(reference.prompts[number])
        assert usage.completion_tokens == len(said) * len(choices)


def test_a_known_name_samples_as_its_card_says(url: str) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}

    def said(**sampling: float) -> list[str]:
        asked = {"model": NAME, "messages": [question], "max_tokens": 12} | sampling
        bodies = [asked | {"seed": seed} for seed in range(4)]
        answers = [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S).json() for body in bodies]
        return [answer["choices"][0]["message"]["content"] for answer in answers]

    assert said() == said(temperature=0.2, top_p=0.9) != said(temperature=1, top_p=1)
    (card,) = httpx.get(f"{url}/v1/models", timeout=WAIT_S).json()["data"]
    assert card["default_sampling"] == {"temperature": 0.2, "top_p": 0.9}


def test_both_replicas_took_part(rounds: Any, url: str) -> None:
    page = httpx.get(f"{url}/metrics", timeout=WAIT_S).text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    finished = {s.labels["replica"]: s.value for s in samples if s.name == "shoal_finished_requests_total"}
    assert len(finished) == 2 and min(finished.values()) >= 5
    assert {s.labels["status"] for s in samples if s.name == "shoal_http_responses_total"} <= {"200", "503"}


def test_what_was_asked_before_is_found_cached(rounds: Any, url: str, reference: Reference) -> None:
    cold, warm = ([choices[0].cached_tokens for choices in answers] for answers, _ in rounds)
    assert sum(warm) > sum(cold)

    def first(prompt: list[int]) -> Any:
        settings = {"model": reference.folder.name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=settings, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    tokenizer = Tokenizer.from_folder(reference.folder)
    for number in chosen(reference):
        prompt, said = reference.prompts[number], reference.said[number]
        answer = first(prompt)  # alone, it goes to where its prefix is
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(prompt) - 1) // PAGE * PAGE
        assert answer["choices"][0]["text"] == tokenizer.decode(said[:1])


def test_drawn_text_is_the_seeds_alone(rounds: Any, url: str, reference: Reference) -> None:
    async def alone() -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
            return await Asker(client, reference.folder.name).beside()

    (_, cold), (_, warm) = rounds
    assert asyncio.run(alone()) == warm == cold
    drawn = cold[:5]
    assert len(set(drawn)) == 5 and all(re.search(r"\w", text) for text in drawn)
