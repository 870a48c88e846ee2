"""One sequence's life: placed, booked, sent, followed to its end, and resumed elsewhere if its replica dies."""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Protocol, TypeVar

import msgspec

from router.defaults import SamplingDefaults
from router.errors import ApiError, NoReplica, internal, invalid
from router.fleet import Fleet
from router.metrics import Metrics, ReplicaTimes
from router.replicas import ReaderTooSlow, ReplicaLost, Replicas, Stream
from router.tokenizer import Tokenizer
from worker.messages import Failure, Generate, Output, SamplingParams

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A request that has seen so many replicas die is given up: it may be the cause.
MAX_DEATHS = 3
# How often a placer may name a replica that is not connected, and the time to the next try: 10 s. They are counted, for
# how long the placer itself waits for a replica is its own matter.
PLACE_TRIES = 200
PLACE_RETRY_S = 0.05
LONG_TEXT_BYTES = 256 << 10  # about 0.1 s of tokenising


class Placer(Protocol):
    """Chooses a replica and books the request there, in one act (`Fleet.place`)."""

    async def place(self, request_id: str, prompt_ids: list[int], exclude: frozenset[str]) -> str:
        """The chosen replica's id. `exclude` are those that were gone a moment ago; when one is connected again it may
        be chosen. Raises NoReplica when none could be had in a bounded time."""
        ...


class Service:
    """Answers for one model, with whatever replicas there are.

    `model` is its name in the API, `context_length` the most tokens of prompt and output together, `defaults` how it is
    sampled where a request does not say.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        replicas: Replicas,
        placer: Placer,
        fleet: Fleet,
        metrics: Metrics,
        *,
        model: str,
        context_length: int,
        defaults: SamplingDefaults,
    ) -> None:
        self.tokenizer = tokenizer
        self.replicas = replicas
        self.metrics = metrics
        self.model = model
        self.context_length = context_length
        self.defaults = defaults
        self._placer = placer
        self._fleet = fleet
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "text")
        self._long_texts = ThreadPoolExecutor(1, "long-text")

    async def start(self) -> None:
        """To be called in the event loop that will serve."""
        await self.replicas.start()

    async def close(self) -> None:
        await self.replicas.close()
        for threads in (self._threads, self._long_texts):
            threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, num_bytes: int, work: Callable[..., Result], *arguments: object) -> Result:
        """Work on a text of about so many bytes, beside the event loop. Long texts wait for each other, so that short
        ones never wait for them."""
        threads = self._long_texts if num_bytes > LONG_TEXT_BYTES else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingParams, priority: int, arrived: float
    ) -> AsyncGenerator[Output, None]:
        """The outputs of one sequence, to the one with a finish reason. `sampling` has a seed; `arrived` is the
        `perf_counter` of the HTTP request. Raises ApiError.

        Close it (`contextlib.aclosing`) to abort. A sequence that is cut off goes on, after the tokens that were
        yielded, on another replica or the same.
        """
        produced: list[int] = []
        lost: list[str] = []
        deaths = 0
        for run in itertools.count():
            request = Generate(
                request_id=f"{request_id}.{run}",
                prompt_ids=prompt_ids,
                sampling=sampling,
                output_ids=list(produced),
                priority=priority,
            )
            try:
                async with contextlib.aclosing(self._run(request, lost, arrived)) as outputs:
                    async for output in outputs:
                        produced += output.token_ids
                        yield output
                return
            except ReaderTooSlow:
                self.metrics.resumed.labels("slow_reader").inc()
            except ReplicaLost as error:
                lost.append(error.replica_id)
                deaths += not error.dropped
                log.warning("%s: %s, %d of %d times", request_id, error, deaths, MAX_DEATHS)
                if deaths == MAX_DEATHS:
                    raise internal() from error
                self.metrics.resumed.labels("replica_lost").inc()
            if produced:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)

    async def _run(self, request: Generate, lost: list[str], arrived: float) -> AsyncGenerator[Output, None]:
        """On one replica. Raises ReplicaLost, ReaderTooSlow, ApiError."""
        try:
            replica_id, stream = await self._send(request, lost)
            clock = _Clock(self.metrics.replica(replica_id), arrived, resumed=bool(request.output_ids))
            try:
                async for output in stream:
                    if output.finish_reason == "error":
                        raise _failed(output.failure)
                    if clock.first_token(output):
                        self._fleet.first_token(request.request_id)
                    yield output
            finally:
                stream.close()
        finally:
            self._fleet.release(request.request_id)

    async def _send(self, request: Generate, lost: list[str]) -> tuple[str, Stream]:
        """Places, books and sends. A placer may name a replica whose loss it has not heard of yet: then again."""
        token_ids = request.prompt_ids + request.output_ids
        unreachable = set(lost)
        for _ in range(PLACE_TRIES):
            exclude = frozenset(unreachable - self.replicas.ready)
            replica_id = await self._placer.place(request.request_id, token_ids, exclude)
            booking = self._fleet.booking(request.request_id)
            request.booking = 0 if booking is None else booking.number
            try:
                return replica_id, self.replicas.generate(replica_id, request)
            except ReplicaLost:
                self._fleet.release(request.request_id)
                unreachable.add(replica_id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.replicas.changed(), PLACE_RETRY_S)
        raise NoReplica()


class _Clock:
    """Measures one run of a sequence."""

    def __init__(self, times: ReplicaTimes, arrived: float, resumed: bool) -> None:
        self._times = times
        self._arrived = arrived
        self._resumed = resumed
        self._last: float | None = None

    def first_token(self, output: Output) -> bool:
        """Counts the output; whether it brought the first token of this run."""
        now = perf_counter()
        first = self._last is None
        if output.queue_s is not None:
            self._times.queue.observe(output.queue_s)
        if output.finish_reason is not None:
            self._times.request.observe(now - self._arrived)
        if not output.token_ids:
            return False
        if self._last is not None:
            gap = (now - self._last) / len(output.token_ids)
            for _ in output.token_ids:
                self._times.inter_token.observe(gap)
        elif not self._resumed:
            self._times.first_token.observe(now - self._arrived)
        self._last = now
        return first


def _failed(failure: Failure | None) -> ApiError:
    """A replica's failure as the client hears of it."""
    if failure is None or failure.kind == "internal":
        log.error("a replica failed a request: %s", failure)
        return internal()
    if failure.kind == "overloaded":
        return ApiError(429, failure.message, code="overloaded", headers={"Retry-After": "1"})
    return invalid(failure.message, failure.param, "invalid_value")
