"""Attacks of one client, which shall keep others from a server.

Each attack goes on until it is cancelled, and then leaves nothing behind: its connections end, its responses in the
background are cancelled, its programs are ended.
"""

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random
from typing import Any
from uuid import uuid4

from bench.door.connections import HttpFrom
from bench.door.paced_client import CHAT, COMPLETIONS, RESPONSES, TOKENIZE, PacedClient
from bench.load.http import Broken

COUNT_TOKENS = "/v1/messages/count_tokens"
MIB = 1 << 20
REFUSED_S = 0.1  # an attack asks again so much later where it is refused or its connection ends
END_S = 20.0  # the clean-up may take
DAY_S = 86400.0
GONE = (OSError, Broken, asyncio.IncompleteReadError)
SLOW_PROPERTIES = 300  # of a schema that takes a quarter of a second to compile


class Attacker:
    """The client that attacks. `statuses`: the answers that it got, by status. `ends`: requests that its end sends."""

    def __init__(self, http: HttpFrom, key: str, model: str, random: Random) -> None:
        self.http, self.key, self.model, self.random = http, key, model, random
        self.statuses: Counter[str] = Counter()
        self.ends: list[tuple[str, str]] = []

    async def ask(
        self, path: str, body: dict[str, Any] | bytes = b"", method: str = "POST", hang_up_s: float | None = None
    ) -> tuple[int, bytes]:
        """The status and the whole body of an answer. A client that hangs up after `hang_up_s` gets the status 0.
        Raises an error of `GONE` if the connection ends."""
        sent = body if isinstance(body, bytes) else self.encoded(body)
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(hang_up_s):
                status = await self.http.send(method, path, sent, lambda data, _status, _now: parts.append(data))
        except TimeoutError:
            self.statuses["hung up"] += 1
            return 0, b""
        self.statuses[str(status)] += 1
        if status >= 400:
            await asyncio.sleep(REFUSED_S)
        return status, b"".join(parts)

    async def always(self, at_once: int, one: Callable[[int], Awaitable[Any]]) -> None:
        """Does something again and again, `at_once` times at the same time."""

        async def often(number: int) -> None:
            while True:
                try:
                    await one(number)
                except GONE:
                    self.statuses["ended"] += 1
                    await asyncio.sleep(REFUSED_S)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for number in range(at_once):
                group.create_task(often(number))

    def encoded(self, body: dict[str, Any]) -> bytes:
        return json.dumps({"model": self.model} | body).encode()

    def head(self, length: int) -> bytes:
        """The head of a request whose body has a length."""
        return (
            f"POST {CHAT} HTTP/1.1\r\nHost: server\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    def text(self, size: int) -> str:
        """A text of `size` bytes, which are as many tokens, that is not cached."""
        return f"{uuid4().hex[:16]} {'lorem ipsum ' * (size // 12)}"[:size].ljust(size, "x")

    async def end(self) -> None:
        """Leaves nothing behind."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                for method, path in self.ends:
                    with contextlib.suppress(*GONE):
                        await self.http.send(method, path, b"", lambda *_: None)
        self.http.close()


# ---------------------------------------------------------------- bodies and connections


async def announced_bodies(attacker: Attacker) -> None:
    """64 connections announce a body of 8 MiB each, and send none."""

    async def one(number: int) -> None:
        async with attacker.http.raw() as (reader, writer):
            writer.write(attacker.head(8 * MIB))
            await _status(attacker, reader)

    await attacker.always(64, one)


async def trickled_bodies(attacker: Attacker) -> None:
    """64 connections send a body of 8 MiB each, a kilobyte a second."""

    async def one(number: int) -> None:
        async with attacker.http.raw() as (reader, writer):
            writer.write(attacker.head(8 * MIB))
            answer = asyncio.create_task(_status(attacker, reader))
            try:
                while not answer.done():
                    writer.write(b" " * 1024)
                    await asyncio.wait([answer], timeout=1)
                await answer
            finally:
                answer.cancel()

    await attacker.always(64, one)


async def held_bodies(attacker: Attacker) -> None:
    """16 connections send all but the last byte of a body of 8 MiB each, and then wait."""

    async def one(number: int) -> None:
        async with attacker.http.raw() as (reader, writer):
            writer.write(attacker.head(8 * MIB) + b" " * (8 * MIB - 1))
            await _status(attacker, reader)

    await attacker.always(16, one)


async def idle_connections(attacker: Attacker) -> None:
    """Twice as many connections as the server admits, half of them with the beginning of a request."""

    async def one(number: int) -> None:
        async with attacker.http.raw() as (reader, writer):
            if number % 2:
                writer.write(attacker.head(9)[:40])
            await _status(attacker, reader)

    await attacker.always(512, one)


async def _status(attacker: Attacker, reader: asyncio.StreamReader) -> None:
    """Waits for an answer's first line. Raises IncompleteReadError if the connection ends without one."""
    attacker.statuses["opened"] += 1
    line = await reader.readuntil(b"\r\n")
    attacker.statuses[line.split()[1].decode()] += 1
    await asyncio.sleep(REFUSED_S)


# ---------------------------------------------------------------- shares of the replicas


async def fresh_users(attacker: Attacker) -> None:
    """24 requests at once, each with a `user` that was never named."""

    async def one(number: int) -> None:
        user = uuid4().hex
        await attacker.ask(COMPLETIONS, _prompt(attacker, 150, 24) | {"user": user})

    await attacker.always(24, one)


async def too_large(attacker: Attacker) -> None:
    """8 requests at once for answers of 8,000 tokens, of which few fit into the KV cache together."""
    await attacker.always(8, lambda _: attacker.ask(COMPLETIONS, _prompt(attacker, 20, 8000)))


async def long_outputs(attacker: Attacker) -> None:
    """Answers of 400 tokens on all slots of all replicas, and as many that wait."""
    await attacker.always(64, lambda _: attacker.ask(COMPLETIONS, _prompt(attacker, 20, 400)))


async def long_prompts(attacker: Attacker) -> None:
    """16 prompts of 4,000 tokens at once."""
    await attacker.always(16, lambda _: attacker.ask(COMPLETIONS, _prompt(attacker, 4000, 4)))


async def many_choices(attacker: Attacker) -> None:
    """4 requests at once for 100 answers each."""
    await attacker.always(4, lambda _: attacker.ask(COMPLETIONS, _prompt(attacker, 100, 100) | {"n": 100}))


async def then(attacker: Attacker) -> None:
    """16 requests at once for one token, with 4,000 bytes to be computed after it."""

    async def one(number: int) -> None:
        program = {"id": uuid4().hex, "branch": "a"}
        body = _prompt(attacker, 20, 1) | {"program": program | {"then": attacker.text(4000)}}
        status, _ = await attacker.ask(COMPLETIONS, body)
        if status == 200:
            await attacker.ask(f"/v1/programs/{program['id']}", method="DELETE")

    await attacker.always(16, one)


async def leases(attacker: Attacker) -> None:
    """8 programs at once with prompts of 1,500 tokens, each of which wants them kept for an hour."""

    async def one(number: int) -> None:
        program = uuid4().hex
        attacker.ends.append(("DELETE", f"/v1/programs/{program}"))
        body = _prompt(attacker, 1500, 1) | {"program": {"id": program, "branch": "a", "lease_s": 3600}}
        await attacker.ask(COMPLETIONS, body)

    await attacker.always(8, one)


def _prompt(attacker: Attacker, prompt: int, output: int) -> dict[str, Any]:
    """A request with a prompt and an answer of these lengths, in tokens."""
    return {"prompt": attacker.text(prompt), "max_tokens": output, "ignore_eos": True}


# ---------------------------------------------------------------- stored responses


async def background_slots(attacker: Attacker) -> None:
    """As many responses of 2,000 tokens in the background as the server admits."""

    async def one(number: int) -> None:
        await _background(attacker, 2000)

    await attacker.always(4, one)


async def followers(attacker: Attacker) -> None:
    """40 connections that follow a running response whose input has 7 MB, and read it."""
    path = None
    while path is None:
        path = await _background(attacker, 6000, _ballast(7 * MIB), stream=True)

    async def one(number: int) -> None:
        query = "" if number % 8 == 0 else "?stream=true"
        await attacker.ask(f"{path}{query}", method="GET", hang_up_s=1 + attacker.random.random())

    await attacker.always(40, one)


async def chains(attacker: Attacker) -> None:
    """8 requests at once that continue a chain of responses with 7 MB in all."""
    last: dict[str, Any] = {}
    for _ in range(7):
        body = {"input": _ballast(MIB - 4096), "max_output_tokens": 1, "ignore_eos": True} | last
        status, answer = await attacker.ask(RESPONSES, body)
        if status == 200:
            last = {"previous_response_id": json.loads(answer)["id"]}
            attacker.ends.append(("DELETE", f"{RESPONSES}/{last['previous_response_id']}"))

    async def one(number: int) -> None:
        body = {"input": "On.", "max_output_tokens": 1, "store": False, "ignore_eos": True} | last
        await attacker.ask(RESPONSES, body)

    await attacker.always(8, one)


async def stored_flood(attacker: Attacker) -> None:
    """4 requests at once whose responses have 4 MB each to be stored."""
    body = attacker.encoded({"input": _ballast(4 * MIB), "max_output_tokens": 1, "ignore_eos": True})

    async def one(number: int) -> None:
        status, answer = await attacker.ask(RESPONSES, body)
        if status == 200:
            attacker.ends.append(("DELETE", f"{RESPONSES}/{json.loads(answer)['id']}"))

    await attacker.always(4, one)


async def _background(
    attacker: Attacker, tokens: int, items: Sequence[dict[str, Any]] = (), stream: bool = False
) -> str | None:
    """Begins a response in the background. Returns its path, None if it was refused."""
    said = {"role": "user", "content": attacker.text(40)}
    body = {"input": [*items, said], "max_output_tokens": tokens, "ignore_eos": True, "background": True}
    if not stream:
        status, answer = await attacker.ask(RESPONSES, body)
        if status != 200:
            return None
        name = json.loads(answer)["id"]
    else:
        begun = await _first_event(attacker, body)
        if begun is None:
            return None
        name = begun["response"]["id"]
    attacker.ends.append(("POST", f"{RESPONSES}/{name}/cancel"))
    attacker.ends.append(("DELETE", f"{RESPONSES}/{name}"))
    return f"{RESPONSES}/{name}"


async def _first_event(attacker: Attacker, body: dict[str, Any]) -> Any:
    """The first event of a stream that is then hung up; None if there is none."""
    sent = attacker.encoded(body | {"stream": True})
    async with attacker.http.raw() as (reader, writer):
        writer.write(attacker.head(len(sent)).replace(CHAT.encode(), RESPONSES.encode()) + sent)
        while line := await reader.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
    return None


def _ballast(size: int) -> list[dict[str, Any]]:
    """Items of about `size` bytes that no template renders."""
    return [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r" * size}], "summary": []},
        {"role": "user", "content": "Go."},
    ]


# ---------------------------------------------------------------- texts and grammars


async def long_texts(attacker: Attacker) -> None:
    """8 texts of 4 MB at once, to be answered, tokenised and counted, from clients that hang up."""
    text = attacker.text(4 * MIB)
    chat = attacker.encoded({"messages": [{"role": "user", "content": text}], "max_tokens": 1})
    bodies = itertools.cycle([(CHAT, chat), (TOKENIZE, attacker.encoded({"prompt": text})), (COUNT_TOKENS, chat)])

    async def one(number: int) -> None:
        path, body = next(bodies)
        await attacker.ask(path, body, hang_up_s=0.5)

    await attacker.always(8, one)


async def short_texts(attacker: Attacker) -> None:
    """16 texts of 200 kB at once, to be tokenised."""
    body = attacker.encoded({"prompt": attacker.text(200_000)})
    await attacker.always(16, lambda _: attacker.ask(TOKENIZE, body))


async def slow_grammars(attacker: Attacker) -> None:
    """24 grammars at once that take a quarter of a second to compile, each a new one, from clients that hang up."""

    async def one(number: int) -> None:
        text = {"type": "string", "pattern": "^[a-z]{1,40}$"}
        schema = {"type": "object", "properties": {f"{uuid4().hex}{i}": text for i in range(SLOW_PROPERTIES)}}
        body = _prompt(attacker, 20, 4) | {"structured_outputs": {"json": schema}}
        await attacker.ask(COMPLETIONS, body, hang_up_s=1.0)

    await attacker.always(24, one)


async def refused_grammars(attacker: Attacker) -> None:
    """16 requests at once with one grammar, which takes too long to compile."""
    nested = "(((a{1,90}b?){1,90}c?){1,90}d?){1,90}"

    async def one(number: int) -> None:
        await attacker.ask(COMPLETIONS, _prompt(attacker, 20, 4) | {"structured_outputs": {"regex": nested}})

    await attacker.always(16, one)


# ---------------------------------------------------------------- all of them

NEIGHBOUR, TOGETHER = "neighbour", "together"
Attack = Callable[[Attacker], Awaitable[None]]
ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        announced_bodies, trickled_bodies, held_bodies, idle_connections, fresh_users, too_large, long_outputs,
        long_prompts, many_choices, then, leases, background_slots, followers, chains, stored_flood, long_texts,
        short_texts, slow_grammars, refused_grammars,
    )
}  # fmt: skip


async def neighbour(attacker: Attacker, rate_s: float) -> None:
    """The control: a second client like the bystander."""
    client = PacedClient(attacker.http, attacker.model, rate_s, attacker.random)
    try:
        await client.run(DAY_S)
    finally:
        for answer in client.answers:
            attacker.statuses["200" if answer.error is None else "other"] += 1
        attacker.ends += [("DELETE", f"{RESPONSES}/{name}") for name in client.kept]


@contextlib.asynccontextmanager
async def attacking(attacker: Attacker, attacks: Sequence[Attack]) -> AsyncIterator[None]:
    """Attacks run within this context."""

    async def again_and_again(attack: Attack) -> None:
        """An attack whose preparation lost its connection, as the server is busy with the others, begins again."""
        while True:
            try:
                await attack(attacker)
            except GONE:
                attacker.statuses["ended"] += 1
                await asyncio.sleep(REFUSED_S)

    tasks = [asyncio.ensure_future(again_and_again(attack)) for attack in attacks]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await attacker.end()
        for error in ended:
            if isinstance(error, Exception):  # not that it was cancelled
                raise error
