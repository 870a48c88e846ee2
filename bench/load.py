"""The load: which request is sent when. Open (sessions arrive at their times, whatever the server does) or closed (so
many sessions at once, the next begins when one ends)."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.client import Endpoint, ask
from bench.http import Http
from bench.metrics import Sample
from bench.workload import Session, Span, Turn, Vocabulary


@dataclass
class Load:
    """One run of a workload against a server. `samples` fills as requests are sent, in that order."""

    sessions: Sequence[Session]
    http: Http
    endpoint: Endpoint
    vocabulary: Vocabulary
    timeout_s: float
    samples: list[Sample] = field(default_factory=list)

    @property
    def planned(self) -> int:
        """Requests in the workload."""
        return sum(len(session.turns) for session in self.sessions)

    def elapsed_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._start

    async def run(self, concurrency: int | None = None) -> None:
        """Send everything and wait for every answer. Without `concurrency` each session begins at its `arrival_s`;
        with it, that many run at once, in order, and one that thinks keeps its place.

        Cancelling it gives up what is under way; those samples end as interrupted.
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
                talk.prepare()  # long prompts take milliseconds to make: before they are due
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
    """One session as it unfolds: what was said so far, and the request that comes next."""

    def __init__(self, load: Load, index: int) -> None:
        self._load, self._index = load, index
        self._turns = load.sessions[index].turns
        self._said = ""  # prompts and answers so far, for completions
        self._messages: list[dict[str, str]] = []  # the same for chat
        self._next: bytes | None = None

    def prepare(self, turn: int = 0) -> bytes:
        """The body of the request of this turn; every turn is prepared once."""
        if self._next is None:
            now = self._turns[turn]
            self._next = self._load.endpoint.body(self._prompt(now.spans), now.output_tokens)
        return self._next

    def _prompt(self, spans: Sequence[Span]) -> list[int] | str | list[dict[str, str]]:
        load = self._load
        if load.endpoint.chat:
            self._messages.append({"role": "user", "content": load.vocabulary.text(spans).strip()})
            return self._messages
        if load.endpoint.abilities.prompt_ids:
            return load.vocabulary.ids(spans)
        self._said += load.vocabulary.text(spans)
        return self._said

    async def run(self, due_s: float) -> None:
        """All turns, the first due at `due_s`. After a failure the turns that are left cannot be asked: they are
        failures too, of kind not_sent."""
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

    def _sample(self, turn_index: int, turn: Turn, due_s: float) -> Sample:
        sample = Sample(due_s=due_s, asked_tokens=turn.output_tokens, session=self._index, turn=turn_index)
        self._load.samples.append(sample)
        return sample

    def _give_up(self, first: int) -> None:
        for i, turn in enumerate(self._turns[first:], first):
            now = self._load.elapsed_s()
            sample = self._sample(i, turn, now)
            sample.sent_s = sample.end_s = now
            sample.error, sample.message = "not_sent", "an earlier turn of this session failed"
