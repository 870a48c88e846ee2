"""The load: which request is sent when. In an open load, sessions arrive at given times, whatever the server does. In a
closed load, a fixed number of sessions run at once, and the next one begins when one ends."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.load.client import Endpoint, ask
from bench.load.http import Http
from bench.load.metrics import Sample
from bench.load.workload import ConversationTurn, Session, TokenSpan, Vocabulary


@dataclass
class LoadRun:
    """A run of a workload against a server. Each request that is sent appends its sample to `samples`."""

    sessions: Sequence[Session]
    http: Http
    endpoint: Endpoint
    vocabulary: Vocabulary
    timeout_s: float
    samples: list[Sample] = field(default_factory=list)

    @property
    def planned(self) -> int:
        """The number of requests in the workload."""
        return sum(len(session.turns) for session in self.sessions)

    def elapsed_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._start

    async def run(self, concurrency: int | None = None) -> None:
        """Send all requests and wait for all answers.

        Without `concurrency` the load is open: each session begins at its `arrival_s`, and ValueError is raised if one
        has none. With `concurrency` the load is closed: that many sessions run at once, in order. A session that waits
        for its think time still counts as running.

        Cancellation gives up the requests in flight; the error of their samples is "interrupted".
        """
        self._start = time.perf_counter()
        if concurrency is None:
            await self._open()
        else:
            await self._closed(concurrency)

    async def _open(self) -> None:
        arrivals = [session.arrival_s for session in self.sessions]
        if None in arrivals:
            raise ValueError("an open load needs an arrival time for every session")
        order = sorted(range(len(arrivals)), key=lambda i: arrivals[i] or 0.0)
        async with asyncio.TaskGroup() as group:
            for i in order:
                due_s = arrivals[i] or 0.0
                talk = Talk(self, i)
                talk.prepare()  # ahead of time: a long prompt takes milliseconds to make
                await asyncio.sleep(due_s - self.elapsed_s())
                group.create_task(talk.run(due_s))

    async def _closed(self, concurrency: int) -> None:
        waiting = iter(range(len(self.sessions)))

        async def place() -> None:
            for i in waiting:
                await Talk(self, i).run(self.elapsed_s())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(self.sessions))):
                group.create_task(place())


class Talk:
    """A session in progress: the conversation so far, and the next request."""

    def __init__(self, load: LoadRun, index: int) -> None:
        self._load, self._index = load, index
        self._turns = load.sessions[index].turns
        self._said = ""  # prompts and answers so far, for completions
        self._messages: list[dict[str, str]] = []  # the same for chat
        self._next: bytes | None = None

    def prepare(self, turn: int = 0) -> bytes:
        """The body of the request of this turn. The first call for a turn makes it, later ones return the same."""
        if self._next is None:
            now = self._turns[turn]
            self._next = self._load.endpoint.body(self._prompt(now.spans), now.output_tokens)
        return self._next

    def _prompt(self, spans: Sequence[TokenSpan]) -> list[int] | str | list[dict[str, str]]:
        load = self._load
        if load.endpoint.chat:
            self._messages.append({"role": "user", "content": load.vocabulary.text(spans).strip()})
            return self._messages
        if load.endpoint.abilities.prompt_ids:
            return load.vocabulary.ids(spans)
        self._said += load.vocabulary.text(spans)
        return self._said

    async def run(self, due_s: float) -> None:
        """Run all turns, the first due at `due_s`. After a failed turn the remaining turns cannot be sent. Each of them
        gets a sample with the error "not_sent"."""
        load = self._load
        for i, turn in enumerate(self._turns):
            if i:
                due_s = load.elapsed_s() + turn.think_s
                self.prepare(i)
                await asyncio.sleep(due_s - load.elapsed_s())
            sample = self._sample(i, turn, due_s)
            await ask(load.http, load.endpoint.path, self.prepare(i), sample, load._start, load.timeout_s)
            self._next = None
            if sample.error is not None:
                self._give_up(i + 1)
                return
            self._said += sample.text
            self._messages.append({"role": "assistant", "content": sample.text})

    def _sample(self, turn_index: int, turn: ConversationTurn, due_s: float) -> Sample:
        sample = Sample(due_s=due_s, asked_tokens=turn.output_tokens, session=self._index, turn=turn_index)
        self._load.samples.append(sample)
        return sample

    def _give_up(self, first: int) -> None:
        for i, turn in enumerate(self._turns[first:], first):
            now = self._load.elapsed_s()
            sample = self._sample(i, turn, now)
            sample.sent_s = sample.end_s = now
            sample.error, sample.message = "not_sent", "an earlier turn of this session failed"
