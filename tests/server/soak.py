"""A load of every kind for a long time, after which a server holds no more than before: `make soak`.

    python -m tests.server.soak                              # an hour
    python -m tests.server.soak --minutes 5 --out /tmp/soak  # less: the first sixth is not counted

The server is a real `shoal serve`: a router and a replica of a tiny model, so that there are as many requests as can
be. In each round there are `ROUND` requests, `AT_ONCE` beside each other. Then the server rests until nothing runs and
every connection is closed, and its processes are measured. After the first ten minutes their requests come again: so
caches know all that comes, as that of grammars, which would take an hour of new ones to fill. What still grows is lost.

| kind | requests |
| --- | --- |
| valid | a body for one of the endpoints, as `endpoint_bodies` draws it; every answer must be 200 |
| damaged | the same with something wrong, and stray paths and methods |
| broken off | a connection that ends or is reset in the request or in the answer |
| kept | a response in the background, followed, continued, read, cancelled, deleted |
| late | a deadline that is over too soon |
| read | every GET of the page, `/metrics`, `/state`, and the page itself |

An answer of 500 or above counts as an error, but for a 503 that says why and the 504 of a deadline. The exit code is 1
if there was one, or if a bound is broken. The machine must have cores to spare: where the replica gets no core for
seconds, it is silent, and valid requests get 503.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from bench.results import Figure, write

from .bodies import MODEL, RESPONSES, damaged, encoded
from .broken_off import break_off
from .endpoint_bodies import ENDPOINTS

AT_ONCE = 8
ROUND = 240
WAIT_S = 120.0
WARM = 1 / 6  # of the time: ten minutes of an hour
MIB = 1 << 20
RSS_MIB = {"rank": 50.0, "router": 30.0}  # that a process may grow after the warm-up
PROCESSES = {"rank": "ray::Rank", "router": "shoal:Router"}
FLAT = 2  # descriptors or threads more or fewer are none that are lost with requests


class Load:
    """Requests of every kind at a server, the same for the same numbers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._address = (httpx.URL(url).host, httpx.URL(url).port or 80)
        self._number = 0
        self._reads: list[str] = []
        self.statuses: Counter[str] = Counter()
        self.errors: list[str] = []

    def again(self) -> None:
        """Lets the next requests be the first ones again."""
        self._number = 0

    async def round(self, requests: int = ROUND) -> None:
        """Sends requests, and returns when all have their answers and all connections are closed."""
        limits = httpx.Limits(max_connections=2 * AT_ONCE)
        async with httpx.AsyncClient(base_url=self._url, timeout=WAIT_S, limits=limits) as client:
            if not self._reads:
                page = (await client.get("/openapi.json")).json()
                paths = [path for path, operations in page["paths"].items() if "get" in operations]
                self._reads = [*(path.replace("{", "").replace("}", "") for path in paths), "/openapi.json", "/docs"]
            numbers = iter(range(self._number, self._number + requests))
            self._number += requests

            async def some() -> None:
                for number in numbers:
                    await self._one(client, number)

            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(some())

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        kinds = {
            self._valid: 30, self._damaged: 40, self._broken_off: 10, self._kept: 8, self._late: 6, self._read: 6
        }  # fmt: skip
        (kind,) = chance.choices(list(kinds), list(kinds.values()))
        name = kind.__name__.strip("_")
        try:
            for answer in await kind(client, chance, number):
                self._take(name, number, answer)
        except Exception as error:
            self.errors.append(f"{name}, Random({number}): {type(error).__name__}: {error}")

    def _take(self, kind: str, number: int, answer: httpx.Response) -> None:
        self.statuses[f"{kind} {answer.status_code}"] += 1
        is_wrong = answer.status_code != 200 if kind == "valid" else answer.status_code >= 500
        if is_wrong and answer.status_code in (503, 504):
            is_wrong = kind == "valid" or not is_explained(answer)
        if is_wrong or b'"internal_error"' in answer.content:
            self.errors.append(f"{kind}, Random({number}): {answer.status_code} {answer.text[:300]}")

    async def _valid(self, client: httpx.AsyncClient, chance: random.Random, number: int) -> list[httpx.Response]:
        path = chance.choice(list(ENDPOINTS))
        return [await client.post(path, content=encoded(ENDPOINTS[path](chance)))]

    async def _damaged(self, client: httpx.AsyncClient, chance: random.Random, number: int) -> list[httpx.Response]:
        path = chance.choice(list(ENDPOINTS))
        sent = damaged(chance, path, ENDPOINTS[path](chance))
        return [await client.request(sent.method, sent.path, content=sent.content, headers=sent.headers)]

    async def _broken_off(self, client: httpx.AsyncClient, chance: random.Random, number: int) -> list[httpx.Response]:
        await asyncio.to_thread(break_off, self._address, number)
        self.statuses["broken off"] += 1
        return []

    async def _late(self, client: httpx.AsyncClient, chance: random.Random, number: int) -> list[httpx.Response]:
        path = chance.choice([path for path in ENDPOINTS if path.endswith("completions")])
        headers = {"X-Request-Timeout": str(chance.choice([0.001, 0.02, 0.1]))}
        return [await client.post(path, content=encoded(ENDPOINTS[path](chance)), headers=headers)]

    async def _read(self, client: httpx.AsyncClient, chance: random.Random, number: int) -> list[httpx.Response]:
        return [await client.get(path) for path in self._reads]

    async def _kept(self, client: httpx.AsyncClient, chance: random.Random, number: int) -> list[httpx.Response]:
        body: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": chance.randint(1, 60)}
        made = await client.post(RESPONSES, json=body | {"background": True, "stream": chance.random() < 0.7})
        events = [line for line in made.text.splitlines() if line.startswith("data: ")]
        first = json.loads(events[0].removeprefix("data: "))["response"] if events else made.json()
        name = f"{RESPONSES}/{first['id']}"
        answers = [made, await client.get(name)]
        if events:
            answers.append(await client.get(name, params={"stream": "true", "starting_after": "2"}))
        answers.append(await client.post(RESPONSES, json=body | {"previous_response_id": first["id"]}))
        answers.append(await client.get(f"{name}/input_items"))
        if chance.random() < 0.5:
            answers.append(await client.post(f"{name}/cancel"))
        if chance.random() < 0.8:
            answers.append(await client.delete(name))
        return answers


def is_explained(answer: httpx.Response) -> bool:
    """Whether a 503 or 504 says why: in OpenAI's form by a code, in Anthropic's by a type. `/ready` answers 503 by its
    status alone while the replica is silent."""
    body = answer.json()
    if "error" not in body:
        return answer.request.url.path == "/ready" and body["status"] == "not ready"
    return bool(body["error"].get("code") or (body.get("type") == "error" and body["error"].get("type")))


@dataclass
class Held:
    """What processes hold at rest, by round."""

    processes: dict[str, psutil.Process]
    rounds: list[dict[str, float]] = field(default_factory=list)

    def measure(self) -> None:
        found: dict[str, float] = {}
        for name, process in self.processes.items():
            with process.oneshot():
                found[f"{name}.rss"] = process.memory_info().rss / MIB
                found[f"{name}.descriptors"] = process.num_fds()
                found[f"{name}.threads"] = process.num_threads()
        self.rounds.append(found)

    def growth(self, first: int) -> dict[str, float]:
        """How much more there is in the last tenth of the rounds than in as many after round `first`."""
        counted = self.rounds[first:]
        part = max(1, len(counted) // 10)
        return {
            name: median(each[name] for each in counted[-part:]) - median(each[name] for each in counted[:part])
            for name in counted[0]
        }


def broken_bounds(growth: dict[str, float]) -> list[str]:
    """The names of what has grown by more than it may."""
    return [name for name, more in growth.items() if more > RSS_MIB.get(name.removesuffix(".rss"), FLAT)]


def until_at_rest(url: str) -> None:
    """Waits until the server has nothing to do."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        state = httpx.get(f"{url}/state", timeout=WAIT_S).json()
        loads = [replica["load"] for model in state["models"] for replica in model["replicas"]]
        if loads and not any(load is None or load["running"] or load["waiting"] for load in loads):
            return
        time.sleep(0.05)
    raise RuntimeError("the server has still something to do")


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A `shoal serve` of the tiny model, which ends at the end."""

    # Imported only here: it takes seconds.
    from tests.conftest import make_tiny_llama

    from .conftest import TOOLS_TEMPLATE

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = make_tiny_llama(folder / MODEL)
    template = model / "chat_template.jinja"
    template.write_text(TOOLS_TEMPLATE + template.read_text())
    command = [
        sys.executable, "-m", "shoal.cli", "serve", "--model", str(model), "--port", str(port), "--replicas", "1",
        "--kv-tokens", "16384", "--response-store-dir", str(folder / "responses"), "--response-store-bytes", "4000000",
        "--max-priority", "2147483647", "--context-length", "320", "--max-prompts", "12", "--max-body-bytes", "1048576",
        "--max-running", "24", "--grammar-timeout-s", "5",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            if not any("Ctrl-C" in line for line in process.stdout):
                raise RuntimeError("the server has not started")
            yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.terminate()


def soak(url: str, server: psutil.Process, seconds: float) -> tuple[Load, Held, int]:
    """Runs the load. Returns it, what the processes held, and the first round that counts."""
    children = {child: " ".join(child.cmdline()) for child in server.children(recursive=True)}
    held = Held({name: next(c for c, words in children.items() if mark in words) for name, mark in PROCESSES.items()})
    load = Load(url)
    begun = time.monotonic()
    first = 0
    while (spent := time.monotonic() - begun) < seconds or len(held.rounds) < first + 2:
        if spent >= seconds * WARM and first and (len(held.rounds) - first) % first == 0:
            load.again()
        asyncio.run(load.round())
        until_at_rest(url)
        held.measure()
        first = first if spent >= seconds * WARM else len(held.rounds)
        print(f"{spent:.0f} s", {name: round(value) for name, value in held.rounds[-1].items()}, flush=True)
    return load, held, first


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the load lasts")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the result, door.soak.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as (url, server):
        load, held, first = soak(url, server, 60 * options.minutes)
    growth = held.growth(first)
    units = {"rss": "MiB", "descriptors": "descriptors", "threads": "threads"}
    figures = [Figure(f"door.soak.{name}", more, units[name.split(".")[1]], False) for name, more in growth.items()]
    figures.append(Figure("door.soak.requests", sum(load.statuses.values()), "requests", True))
    figures.append(Figure("door.soak.errors", len(load.errors), "requests", False))
    options.out.mkdir(parents=True, exist_ok=True)
    path = write("door.soak", figures, {"statuses": dict(load.statuses), "held": held.rounds}, folder=options.out)
    print(f"{path}: {growth}\n{dict(load.statuses)}")
    broken = broken_bounds(growth)
    for line in [*load.errors[:20], *(f"{name} has grown by {growth[name]:.1f}" for name in broken)]:
        print(line, file=sys.stderr)
    return 1 if broken or load.errors else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
