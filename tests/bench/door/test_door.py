"""The instrument sees who starves and who is refused, its attacks leave nothing behind, and a whole run of one."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.door import command, paced_client
from bench.door.attacks import ATTACKS, Attacker, attacking, neighbour
from bench.door.command import AttackedServer, AttackRuns, Slice
from bench.door.connections import HttpFrom
from tests.quick_http import local_socket

KEYS = {name: f"sk-{name}" for name in ("bystander", "neighbour", *ATTACKS)}
DELAY_S = 0.15


@dataclass
class Fake:
    """A server where all goes well, except for the bystander alongside some attackers. `delays`, `refuses`, `breaks`:
    attacks alongside which its streams come late, are refused, or end before they have a token."""

    url: str = ""
    delays: str = ""
    refuses: str = ""
    breaks: str = ""
    inside: list[str] = field(default_factory=list)  # the clients whose requests are being answered

    async def answer(self, request: Request) -> Response:
        client = request.headers["authorization"].removeprefix("Bearer sk-")
        self.inside.append(client)
        try:
            return await self._answer(request, client, json.loads(await request.body() or b"{}"))
        finally:
            self.inside.remove(client)

    async def _answer(self, request: Request, client: str, body: dict[str, Any]) -> Response:
        if client in ATTACKS:
            await asyncio.sleep(0.02)  # so that it is inside nearly all the time
        if client == "bystander":
            if self.refuses in self.inside:
                return JSONResponse({"error": {"code": "overloaded"}}, 503)
            if self.delays in self.inside:
                await asyncio.sleep(DELAY_S)
        if body.get("stream"):
            is_cut = client == "bystander" and self.breaks in self.inside
            events = self._events(request.url.path)
            return StreamingResponse(self._stream(events[: 0 if is_cut else None]), media_type="text/event-stream")
        return JSONResponse({"id": "resp_1", "status": "completed", "count": 1})

    def _events(self, path: str) -> list[dict[str, Any]]:
        if path.endswith("responses"):
            kinds = ["response.created", "response.output_text.delta", "response.completed"]
            return [{"type": kind, "response": {"id": "resp_1"}} for kind in kinds]
        return [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "a"}, "text": "a"}]},
        ]

    async def _stream(self, events: Sequence[dict[str, Any]]) -> AsyncIterator[str]:
        for event in events:
            yield f"data: {json.dumps(event)}\n\n"

    async def state(self, request: Request) -> Response:
        return JSONResponse({"models": [{"replicas": [{"load": {"running": 0, "waiting": 0}}]}]})


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    routes = [Route("/state", made.state), Route("/{path:path}", made.answer, methods=["GET", "POST", "DELETE"])]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical", timeout_graceful_shutdown=1))
    listening = local_socket()
    made.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield made
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@contextlib.asynccontextmanager
async def in_process(site: AttackedServer, name: str, attacks: Sequence[str], made: Slice) -> AsyncIterator[None]:
    attacker = Attacker(HttpFrom(site.url, site.keys[name], "127.0.0.3"), site.keys[name], "m", Random(0))
    chosen = [ATTACKS.get(each, lambda own: neighbour(own, site.rate_s)) for each in attacks]
    async with attacking(attacker, chosen):
        yield
    made.statuses = dict(attacker.statuses)


def test_who_starves_and_who_is_refused_is_seen(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttackedServer, "_other", in_process)
    monkeypatch.setattr(command, "LEAD_S", 0.02)
    fake.delays, fake.refuses, fake.breaks = "long_outputs", "long_prompts", "many_choices"
    attacks = ["long_outputs", "long_prompts", "many_choices", "too_large"]
    made = asyncio.run(command.measure(AttackedServer(fake.url, KEYS, 0, 40.0, 0), attacks, 0.3, 1))
    starved, refused, broken, well = made
    assert command.quantile_s(starved.attacked, 0.99) > DELAY_S and starved.refused == []
    assert all("503" in error for error in refused.refused) and len(refused.refused) >= 12
    assert {error.partition(":")[0] for error in broken.refused} == {"chat", "completion", "structured", "response"}
    assert well.refused == []
    assert all(control.refused == [] and control.statuses["200"] for each in made for control in each.controls)
    figures = {figure.name.removeprefix("door.bystander."): figure.value for figure in command.figures(made)}
    assert figures["ttft_p99.vs_neighbour"] == max(each.ratio for each in made)
    assert figures["ttft_p99.vs_neighbour.long_outputs"] == starved.ratio
    assert figures["refusals"] == len(refused.refused) + len(broken.refused)
    assert json.dumps(command.raw(made))


def test_a_hundredth_of_the_answers_makes_a_ratio() -> None:
    def alongside(name: str, *waits_s: float) -> Slice:
        return Slice(name, [paced_client.Waited("chat", wait_s, None) for wait_s in waits_s])

    controls = [alongside("neighbour", *[0.1] * 99), alongside("neighbour", *[0.1] * 101)]
    few, some = ([alongside("too_large", *[0.1] * (200 - late), *[9.0] * late)] for late in (1, 2))
    assert AttackRuns("too_large", controls, few).ratio == pytest.approx(1)
    assert not AttackRuns("too_large", controls, few).starves_bystander
    assert AttackRuns("too_large", controls, some).ratio == pytest.approx(90)
    assert AttackRuns("too_large", controls, some).starves_bystander


def test_an_answer_that_never_comes_counts_as_long_as_it_was_waited_for(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paced_client, "WAIT_S", DELAY_S / 3)
    fake.delays = "too_large"
    fake.inside.append("too_large")

    async def ask() -> list[paced_client.Waited]:
        http = HttpFrom(fake.url, KEYS["bystander"], "127.0.0.2")
        try:
            return await paced_client.PacedClient(http, "m", 100.0, Random(0)).run(0.04)
        finally:
            http.close()

    answers = asyncio.run(ask())
    assert len(answers) == 4 and all(each.error and each.ttft_s >= DELAY_S / 3 for each in answers)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_when_it_is_told_to(fake: Fake, name: str) -> None:
    async def attack() -> tuple[Attacker, set[Any]]:
        attacker = Attacker(HttpFrom(fake.url, KEYS[name], "127.0.0.3"), KEYS[name], "m", Random(0))
        async with attacking(attacker, [ATTACKS[name]]):
            deadline = time.monotonic() + 30
            while not attacker.statuses and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
        return attacker, asyncio.all_tasks() - {asyncio.current_task()}

    attacker, tasks = asyncio.run(attack())
    assert attacker.statuses and not tasks


# ---------------------------------------------------------------- a whole run


def run(folder: Path, *options: str) -> tuple[int, dict[str, float], str]:
    """In a process of its own: it starts Ray."""
    started = [sys.executable, "-m", "bench.door.command", "--out", str(folder), "--seconds", "4", *options]
    ended = subprocess.run(started, capture_output=True, text=True, timeout=280)
    said = ended.stdout + ended.stderr
    assert (folder / "door.json").exists(), said
    result = json.loads((folder / "door.json").read_text())
    return ended.returncode, {figure["name"]: figure["value"] for figure in result["figures"]}, said


@pytest.mark.bench
def test_announced_bodies_refuse_nobody(tmp_path: Path) -> None:
    _, figures, said = run(tmp_path, "--attacks", "announced_bodies")
    assert figures["door.bystander.refusals"] == 0, said
    assert set(figures) == {
        "door.bystander.ttft_p99.vs_neighbour",
        "door.bystander.ttft_p99.vs_neighbour.announced_bodies",
        "door.bystander.refusals",
    }
