"""Clients that ask a server all the time, and know the right answers."""

import asyncio
import json
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from bench.load.http import Broken, Events, Http

REQUEST_S = 150.0  # a request that takes longer has failed
KEPT = 20  # messages of failures
PATH = "/v1/completions"
WORDS = "the sea a boat salt light wind old stone house bread rain wool iron north bell gull rope tide lamp".split()


class Failed(Exception):
    """A request without a whole answer. The message says what came instead."""


@dataclass(frozen=True)
class Question:
    """A request whose answer does not depend on the moment: greedy, or with a seed."""

    prompt: str
    max_tokens: int
    seed: int | None = None
    n: int = 1
    stream: bool = True

    def body(self, model: str) -> dict[str, Any]:
        """The request for `/v1/completions`."""
        sampling: dict[str, Any] = {"temperature": 0} if self.seed is None else {"temperature": 1, "seed": self.seed}
        asked = {"max_tokens": self.max_tokens, "ignore_eos": True, "n": self.n, "stream": self.stream}
        return {"model": model, "prompt": self.prompt, **sampling, **asked}


def questions(random: Random, count: int) -> list[Question]:
    """Questions of several kinds: streams and whole answers, greedy and sampled, one answer and two. Their prompts
    begin with one of three texts."""
    beginnings = [" ".join(random.choices(WORDS, k=30)) for _ in range(3)]
    made = []
    for number in range(count):
        prompt = f"{random.choice(beginnings)} {' '.join(random.choices(WORDS, k=random.randint(1, 20)))}"
        seed = random.randrange(1 << 31) if number % 2 else None
        tokens = random.randint(20, 200)
        made.append(Question(prompt, tokens, seed, n=2 if number % 4 == 3 else 1, stream=number % 3 != 2))
    return made


@dataclass(eq=False)
class Flight:
    """A request on its way. `port`: its client's, 0 before there is one. `is_orphan`: its router was killed."""

    port: int = 0
    has_answer: bool = False
    is_orphan: bool = False


@dataclass
class RequestCounts:
    """Requests by what became of them. `messages`: of the first that failed, and wrong answers."""

    right: int = 0
    wrong: int = 0
    failed: int = 0
    lost_with_router: int = 0
    messages: list[str] = field(default_factory=list)


class SteadyLoad:
    """A number of clients, of which each asks again as soon as it has its answer, over a new connection."""

    def __init__(self, url: str, model: str, asked: Sequence[Question], clients: int, random: Random) -> None:
        """Learns the right answers from the server, which must be undisturbed. Raises Failed."""
        self.counts = RequestCounts()
        self._http, self._model, self._asked, self._random = Http(url), model, asked, random
        self._clients = clients
        self._longest_wait_s = 0.0
        self.flights: set[Flight] = set()  # those that are on their way
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._answers = asyncio.run(self._learn())

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask_all()), name="clients")
        self._thread.start()

    def end(self) -> None:
        """Returns when all requests that are on their way have ended."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def longest_wait_s(self) -> float:
        """The longest time that a client of a stream waited for its next piece, the first one too, since the last
        call. Streams that have not ended do not count yet."""
        longest_s, self._longest_wait_s = self._longest_wait_s, 0.0
        return longest_s

    def orphan(self, own: Collection[int], others: Collection[int]) -> None:
        """Marks the requests of a router that is killed now. `own`: the clients' ports of connections that it has
        accepted. `others`: of those that other routers have accepted. The kernel may have accepted one for it, too."""
        for flight in list(self.flights):
            flight.is_orphan |= flight.port in own or (not flight.has_answer and flight.port not in others)

    async def _learn(self) -> list[list[str]]:
        return [await self._ask(question, Flight()) for question in self._asked]

    async def _ask_all(self) -> None:
        await asyncio.gather(*(self._ask_often() for _ in range(self._clients)))

    async def _ask_often(self) -> None:
        while not self._ending.is_set():
            await self.ask_one()

    async def ask_one(self) -> None:
        """Asks a question, and counts what came of it."""
        number, flight = self._random.randrange(len(self._asked)), Flight()
        self.flights.add(flight)
        try:
            async with asyncio.timeout(REQUEST_S):
                answer = await self._ask(self._asked[number], flight)
        except (Failed, Broken, OSError, TimeoutError) as error:
            self._failed(number, flight, error)
            return
        finally:
            self.flights.remove(flight)
        if answer == self._answers[number]:
            self.counts.right += 1
        else:
            self.counts.wrong += 1
            self._keep(f"question {number}: {answer} in place of {self._answers[number]}")

    def _failed(self, number: int, flight: Flight, error: Exception) -> None:
        if flight.is_orphan and isinstance(error, Broken | ConnectionError):
            self.counts.lost_with_router += 1
            return
        self.counts.failed += 1
        self._keep(f"question {number}: {type(error).__name__}: {error}")

    def _keep(self, message: str) -> None:
        if len(self.counts.messages) < KEPT:
            self.counts.messages.append(f"{time.strftime('%H:%M:%S')} {message}")

    async def _ask(self, question: Question, flight: Flight) -> list[str]:
        """The texts of a question's answers. Raises Failed, Broken or OSError."""
        connection = await self._http.connect()
        flight.port = connection.transport.get_extra_info("sockname")[1]
        body = json.dumps(question.body(self._model)).encode()
        pieces: list[bytes] = []
        times_s = [time.perf_counter()]

        def take(data: bytes, status: int, now_s: float) -> None:
            flight.has_answer = True
            pieces.append(data)
            times_s.append(now_s)

        try:
            status = await connection.send(self._http.request("POST", PATH, body), take)
        finally:
            connection.close()
        data = b"".join(pieces)
        if status != 200:
            raise Failed(f"status {status}: {data[:200].decode(errors='replace')}")
        if not question.stream:
            return [choice["text"] for choice in json.loads(data)["choices"]]
        self._longest_wait_s = max(self._longest_wait_s, *(then - now for now, then in pairwise(times_s)))
        return _texts(data, question.n)


def _texts(data: bytes, n: int) -> list[str]:
    """The texts in the events of a whole stream. Raises Failed."""
    *events, last = Events().feed(data) or [b""]
    if last != b"[DONE]":
        raise Failed(f"the stream ends with {last[:200].decode(errors='replace')}")
    texts, ended = [""] * n, 0
    for event in events:
        value = json.loads(event)
        if "error" in value:
            raise Failed(f"an error event: {value['error']}")
        for choice in value["choices"]:
            texts[choice["index"]] += choice["text"]
            ended += choice["finish_reason"] is not None
    if ended != n:
        raise Failed(f"{ended} of {n} answers have an end")
    return texts
