"""The life of a sequence: placed, booked, sent, followed to its end, and resumed elsewhere if its replica dies."""

import asyncio
import contextlib
import contextvars
import copy
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol, TypeVar

import msgspec
from fastapi import Request

from radix.salt import salted
from router.access.auth import claimant
from router.access.key_file import ANYBODY, ApiClient
from router.access.rate_limits import Ticket
from router.chat.repairs import telling
from router.config import ModelConfig
from router.fleet.demand import Demand, Sleep
from router.fleet.fleet import Fleet, ReplicaView
from router.fleet.queue_wait import ShortestQueue
from router.fleet.resume_pace import ResumePace
from router.formats.format import OutputFormat
from router.metrics import request_log
from router.metrics.metrics import ModelMetrics
from router.metrics.replica_times import ReplicaTimes
from router.prepare.defaults import SamplingDefaults
from router.prepare.pooling import Pooling
from router.programs import BranchCall, BranchText, Home, Programs
from router.replicas.replicas import Replicas
from router.replicas.stream import ReaderTooSlow, ReplicaLost, ReplicaStream
from router.streaming.sse import unless_gone
from router.text.tokenizer import Tokenizer
from router.wire.errors import ApiError, NoReplica, busy, internal, invalid
from worker.client_turns import ClientTurns
from worker.messages import Adapter, AdapterChange, Failure, Generate, Output, Release, SamplingParams
from worker.niceness import YIELDING_NICE

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# A request is given up when this many replicas have died under it: it may be the cause.
MAX_DEATHS = 3
# A request is refused when this many replicas refuse it: they have the least load, and each answers between two steps.
MAX_REFUSALS = 3
# How often a placer may name a replica that is not connected, and the time between tries: 10 s in all. Tries are
# counted, not time, because the placer itself may wait for a replica.
MAX_PLACE_TRIES = 200
PLACE_RETRY_S = 0.05
# The text after an answer is computed with one token of output, the least there is, when nothing else waits.
GREEDY_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
# A shorter text is computed with the next request. A request of its own costs up to a page and one token more, and the
# time between two requests does not make up for that.
MIN_PREFETCHED_CHARS = 256
MAX_PREFETCHED_TEXTS = 32  # of each client, texts that are computed ahead at once
MIN_PRIORITY = -(1 << 31)
# A shorter text takes 0.5 ms, and a thread costs a busy router as much: it waits for the interpreter, and then the loop
# does. Alongside 90 requests a second, all on one core, first tokens of others come after 115 ms instead of 176.
SHORT_TEXT_BYTES = 2048
LONG_TEXT_BYTES = 256 << 10  # takes about 0.1 s to tokenise
# Where cores are busy, a text of megabytes, which has one for seconds, yields to streams and replicas.


class Placer(Protocol):
    """Chooses a replica and books the request there, atomically (`Fleet.place`)."""

    async def place(
        self,
        request_id: str,
        prompt_ids: list[int],
        exclude: frozenset[str],
        refused: frozenset[str] = frozenset(),
        home: Home | None = None,
        output_limit: int | None = None,
    ) -> str:
        """Returns the chosen replica's id. `exclude`: replicas that were gone a moment ago; one that is connected again
        may be chosen. `refused`: replicas that may not be chosen. `home`, `output_limit`: as in `Fleet.place`. Raises
        NoReplica when none is available within a bounded time, or at once when all that exist have refused."""
        ...


class _Refused(Exception):
    """A replica has refused the request: its queue is full."""

    def __init__(self, replica_id: str, failure: Failure) -> None:
        super().__init__(failure.message)
        self.replica_id = replica_id
        self.failure = failure


class SharedReplica:
    """The replica on which sequences start that share their context: that of the first of them. It computes the context
    once, and starts those that are sent at the same time in one step."""

    def __init__(self) -> None:
        self.id: str | None = None
        self.choosing = asyncio.Lock()


class Service:
    """Generates text for one model, on whatever replicas there are.

    `model` is its name in the API. `context_length` is the most tokens of prompt and output together. `defaults` are
    the sampling parameters of requests that leave them out. `output_format` is how the model writes thinking and calls.
    `pooling`: how the model's embeddings are made. `config`: its further names, and limits of its requests. `sleep`:
    for a model of which autoscaling may take the last replica away.
    `pooling`: how the model's embeddings are made. `config`: its further names, and limits of its requests. `adapters`
    are services too, by name: each is this one with an `adapter`, the base model's being None. `base_model` is the name
    of the model without an adapter.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        replicas: Replicas,
        placer: Placer,
        fleet: Fleet,
        metrics: ModelMetrics,
        *,
        model: str,
        context_length: int,
        defaults: SamplingDefaults,
        output_format: OutputFormat,
        config: ModelConfig,
        pooling: Pooling | None = None,
        sleep: Sleep | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.replicas = replicas
        self.metrics = metrics
        self.model = self.base_model = model
        self.adapter: Adapter | None = None
        self.adapters: dict[str, Service] = {}
        self.config = config
        self.aliases = config.aliases
        self.context_length = context_length
        self.defaults = defaults
        self.output_format = output_format
        self.pooling = pooling or Pooling()
        self.programs = Programs()
        metrics.watch_programs(self.programs)
        self._placer = placer
        self._sleep = sleep
        self._placing = 0  # requests for which a replica is looked for
        self._prefetches: dict[asyncio.Task[None], tuple[str, str]] = {}  # with the program, and the client
        self._fleet = fleet
        fleet.on_decision = metrics.placement.observe
        self._resume_pace = ResumePace(self._resume_rate)
        self.replicas.on_adapters = self._hear
        self._texts = ClientTurns(min(4, os.cpu_count() or 1), "text")
        self._long_texts = ClientTurns(2, "long-text", each=1, nice=YIELDING_NICE)
        for name, path in (adapters or {}).items():
            self._take(Adapter(name, path))

    async def start(self) -> None:
        """Starts the connections. Call it in the event loop that will serve."""
        await self.replicas.start()

    async def close(self) -> None:
        await self.replicas.close()
        await self._resume_pace.close()
        for task in self._prefetches:
            task.cancel()
        await asyncio.gather(*self._prefetches, return_exceptions=True)
        for threads in (self._texts, self._long_texts):
            threads.close()

    # ------------------------------------------------ adapters

    async def try_adapter(self, adapter: Adapter) -> None:
        """Computes a token with an adapter, so that a replica reads it. Raises ApiError if no replica can use it."""
        one = GREEDY_TOKEN, MIN_PRIORITY, perf_counter()
        async with contextlib.aclosing(self._with(adapter).generate(f"lora-{adapter.version}", [0], *one)) as outputs:
            async for _ in outputs:
                pass

    def load_adapter(self, adapter: Adapter) -> None:
        """Serves an adapter under its name, and tells other routers."""
        self._take(adapter)
        self.replicas.tell_adapters(AdapterChange([adapter]))

    def unload_adapter(self, name: str) -> None:
        """Takes the name of an adapter away, here and at other routers."""
        del self.adapters[name]
        self.replicas.tell_adapters(AdapterChange([], [name]))

    def _hear(self, change: AdapterChange) -> None:
        for adapter in change.loaded:
            self._take(adapter)
        for name in change.unloaded:
            self.adapters.pop(name, None)

    def _take(self, adapter: Adapter) -> None:
        self.adapters[adapter.name] = self._with(adapter)

    def _with(self, adapter: Adapter) -> "Service":
        service = copy.copy(self)  # the same replicas, programs and metrics
        service.adapter, service.model, service.aliases = adapter, adapter.name, ()
        return service

    # ------------------------------------------------ requests

    def highest_priority(self, client: ApiClient) -> int:
        """The highest priority that requests of this client may have: as its key says, else as the model does."""
        return self.config.max_priority if client.max_priority is None else client.max_priority

    def check_priority(self, priority: int | None, client: ApiClient) -> None:
        """Raises ApiError (400) for a priority that requests of this client may not have."""
        most = self.highest_priority(client)
        if priority is not None and priority > most:
            raise invalid(
                f"'priority' is {priority}; here it may be from {MIN_PRIORITY} to {most} (higher goes first).",
                "priority",
                "invalid_value",
            )

    def views(self) -> list[ReplicaView]:
        """The replicas that are connected, as placement sees them."""
        return self._fleet.snapshot()

    def shortest_queue(self) -> ShortestQueue | None:
        """The least queue of all connected replicas that get new requests; None if there is none."""
        return self._fleet.shortest_queue(self.replicas.closed)

    @property
    def can_answer(self) -> bool:
        """Whether a request would be answered now, if only after a replica has started."""
        return bool(self.replicas.ready) or (self._sleep is not None and self._sleep.can_answer)

    def demand(self) -> Demand:
        """The work that requests bring to the replicas now."""
        ready = len(self.replicas.ready)
        return self._fleet.demand(self.replicas.closed, ready, 0 if ready else self._placing)

    def told_wanted(self, number: int, reason: str) -> None:
        """Takes how many replicas autoscaling wants, and why it changed the number last."""
        self.metrics.autoscaled(number, reason)
        if self._sleep is not None:
            self._sleep.told(number, len(self.replicas.ready))

    def missed_deadline(self) -> None:
        """Counts a request whose time was over before its answer was complete."""
        self.metrics.missed_deadlines("expired")

    def check_queue(self, timeout_s: float | None) -> None:
        """Raises ApiError (429) for a new request if the queues are full, or if it could not begin within `timeout_s`.
        Call it before the request costs anything."""
        queue = self.shortest_queue()
        if queue is None:
            return
        if timeout_s is not None and queue.wait_s >= timeout_s:
            self.metrics.missed_deadlines("refused")
            reason = f"The request would wait {queue.wait_s:.1f} s, longer than its timeout of {timeout_s:g} s"
            raise busy(f"{reason}; try again in {{}} s.", queue.wait_s - timeout_s, param="timeout")
        if queue.tokens >= self.config.max_waiting_tokens:
            raise busy(f"{queue.tokens} prompt tokens wait already; try again in {{}} s.", queue.wait_s / 2)

    async def in_thread(
        self, request: Request, num_bytes: int, work: Callable[..., Result], *arguments: object
    ) -> Result:
        """Runs `work`, on a text of about `num_bytes` bytes, for the client of `request`: a short one here, others in a
        thread. Long texts have threads of their own, so that others never wait for them, and clients take turns. If the
        client leaves first, raises ClientGone, and what has not begun is dropped."""
        threads, client = self._threads(num_bytes), claimant(request)
        at_once = threads is self._texts and threads.has_room(client)  # and soon over
        entry = request_log.current()
        with telling(None if entry is None else entry.repaired_part):
            if num_bytes <= SHORT_TEXT_BYTES:
                return work(*arguments)
            done = threads.run(client, contextvars.copy_context().run, work, *arguments)
        return await (done if at_once else unless_gone(request.scope, request.receive, done))

    def _threads(self, num_bytes: int) -> ClientTurns:
        return self._long_texts if num_bytes > LONG_TEXT_BYTES else self._texts

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        priority: int,
        arrived: float,
        call: BranchCall | None = None,
        output_ids: Sequence[int] = (),
        prediction_ids: Sequence[int] = (),
        shared: SharedReplica | None = None,
        client: ApiClient = ANYBODY,
        user: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[Output, None]:
        """Yields the outputs of one sequence; the last has a finish reason. `sampling` has a seed. `arrived` is the
        `perf_counter` of the HTTP request. `call`: the program that it belongs to. `output_ids`: tokens that count as
        its output already, which are not yielded. `prediction_ids`: the client's guess at the output. `shared`: the
        replica of the sequences that share its context. `client`, `user`: whose share of the service it is from.
        `cache_salt`: of its prefixes. Raises ApiError.

        Close the iterator (`contextlib.aclosing`) to abort. A sequence that is cut off is resumed after the tokens that
        were yielded, on another replica or the same. A sequence that a full replica refuses is offered to two others.
        """
        head_start_s = 0.0 if call is None else call.head_start_s(self.programs.age_s(call.lease.owner))
        produced = list(output_ids)
        lost: list[str] = []
        refused: dict[str, Failure] = {}
        resumed = bool(output_ids)
        deaths = 0
        entry = request_log.current()
        program = None if call is None else call.lease.owner
        phases = None if entry is None else entry.phases(request_id, arrived, program)
        for run in itertools.count():
            request = Generate(
                request_id=f"{request_id}.{run}",
                prompt_ids=prompt_ids,
                sampling=sampling,
                output_ids=list(produced),
                prediction_ids=list(prediction_ids),
                resumed=resumed,
                priority=priority,
                head_start_s=head_start_s,
                client=client.tenant,
                user=user,
                weight=client.weight,
                cache_salt=cache_salt,
                adapter=self.adapter,
                lease=None if call is None else call.lease,
            )
            try:
                run_on_one = self._run(request, lost, frozenset(refused), arrived, call, shared, phases)
                async with contextlib.aclosing(run_on_one) as outputs:
                    async for output in outputs:
                        produced += output.token_ids
                        yield output
                return
            except _Refused as error:
                refused[error.replica_id] = error.failure
                if len(refused) == MAX_REFUSALS:
                    raise _overloaded(refused.values()) from None
                if phases is not None:
                    phases.again()
                continue
            except NoReplica as error:
                raise _overloaded(refused.values()) if refused else error.of(self.model) from None
            except ReaderTooSlow:
                self.metrics.resumed("slow_reader")
                if phases is not None:
                    phases.lost("slow_reader")
            except ReplicaLost as error:
                if phases is not None:
                    phases.lost("replica_left" if error.taken_away else "replica_lost")
                lost.append(error.replica_id)
                deaths += not error.taken_away
                log.warning(
                    "%s goes on elsewhere after %d tokens: %s (death %d of at most %d)",
                    *(request_id, len(produced), error, deaths, MAX_DEATHS),
                    extra={"replica": error.replica_id, "sequence": request_id},
                )
                if deaths == MAX_DEATHS:
                    raise internal() from error
                self.metrics.resumed("replica_left" if error.taken_away else "replica_lost")
                token_ids = _cached_as(prompt_ids + produced, request.prefix_salt)
                await self._resume_pace.turn(self._fleet.prompt_s(token_ids, self.replicas.closed))
            resumed = True
            if entry is not None:
                entry.resumed += 1
            refused.clear()  # even a full replica takes a resumed sequence
            if produced:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)

    def _resume_rate(self) -> float:
        """The router's part of the time that replicas have for resumed prompts; other routers have lost streams too."""
        return self._fleet.resume_rate(self.replicas.closed) / self.replicas.num_routers

    def end_program(self, program: str) -> None:
        """Forgets a program, and ends its leases wherever they are. What was to be computed ahead for it is dropped."""
        self.programs.remove(program)
        for task, (owner, _) in self._prefetches.items():
            if owner == program:
                task.cancel()
        self.replicas.tell_all(Release([program]))

    def prefetch(
        self, request_id: str, branch: BranchText, call: BranchCall, cache_salt: str, ticket: Ticket, user: str
    ) -> None:
        """Lets the home of a branch compute the constant text that will follow it, unless that is short, or the home is
        full or gone. `ticket`, `user`: those of the request before. The text counts as its client's: without tokens
        left, nothing is computed ahead. Nor is it while `MAX_PREFETCHED_TEXTS` texts of the client wait: at the lowest
        priority, they may wait for ever, and queues would fill with what no request is for."""
        home = self.programs.home(call)
        client = ticket.client.tenant
        if (
            home is not None
            and home.replica_id in self.replicas.ready
            and call.then is not None
            and len(call.then) >= MIN_PREFETCHED_CHARS
            and ticket.has_tokens
            and sum(of == client for _, of in self._prefetches.values()) < MAX_PREFETCHED_TEXTS
        ):
            text = call.then, cache_salt, ticket, user
            task = asyncio.ensure_future(self._prefetch(request_id, home.replica_id, branch, *text))
            self._prefetches[task] = call.lease.owner, client
            task.add_done_callback(self._prefetches.pop)

    async def _prefetch(
        self,
        request_id: str,
        replica_id: str,
        branch: BranchText,
        text: str,
        cache_salt: str,
        ticket: Ticket,
        user: str,
    ) -> None:
        prompt_ids = await self._threads(len(text)).run(
            ticket.client.tenant, branch.prompt, text, self.tokenizer.encode_part
        )
        ticket.add_tokens(prompt=len(prompt_ids) - len(branch.token_ids))
        request = Generate(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=GREEDY_TOKEN,
            priority=MIN_PRIORITY,
            client=ticket.client.tenant,
            user=user,
            weight=ticket.client.weight,
            cache_salt=cache_salt,
            adapter=self.adapter,
        )
        with contextlib.suppress(ReplicaLost, ReaderTooSlow):
            stream = self.replicas.generate(replica_id, request)
            try:
                async for _ in stream:
                    pass  # one token, or a refusal
            finally:
                stream.close()

    async def _run(
        self,
        request: Generate,
        lost: list[str],
        refused: frozenset[str],
        arrived: float,
        call: BranchCall | None,
        shared: SharedReplica | None,
        phases: request_log.Phases | None,
    ) -> AsyncGenerator[Output, None]:
        """Runs the sequence on one replica. Raises ReplicaLost, ReaderTooSlow, _Refused, ApiError."""
        try:
            home = None if call is None else self.programs.home(call)
            replica_id, stream = await self._send(request, lost, refused, home, shared)
            if (entry := request_log.current()) is not None:
                entry.began(replica_id)
            if phases is not None:
                phases.sent(replica_id)
            num_tokens = len(request.prompt_ids) + len(request.output_ids)
            booking = self._fleet.booking(request.request_id)
            expected = 0 if booking is None else booking.cached_tokens
            lengths = len(request.prompt_ids), len(request.output_ids)
            clock = _Clock(self.metrics.replica(replica_id), arrived, *lengths)
            try:
                async for output in stream:
                    if output.finish_reason == "error":
                        if output.failure is not None and output.failure.kind == "overloaded":
                            raise _Refused(replica_id, output.failure)
                        raise _failed(output.failure, request.request_id)
                    if output.cached_tokens is not None:
                        self.metrics.found_cached(expected, output.cached_tokens)
                    if entry is not None and output.queue_s is not None:
                        entry.queued(output.queue_s)
                        if phases is not None:
                            phases.queued(output.queue_s)
                    if clock.first_token(output):
                        self._fleet.first_token(request.request_id)
                        if entry is not None:
                            entry.first_token()
                            if phases is not None:
                                phases.first_token()
                    num_tokens += len(output.token_ids)
                    if call is not None:
                        self.programs.set_home(call, Home(replica_id, num_tokens))
                    yield output
            finally:
                stream.close()
                if phases is not None:
                    phases.last_token(clock.last)
        finally:
            self._fleet.release(request.request_id)

    async def _send(
        self,
        request: Generate,
        lost: list[str],
        refused: frozenset[str],
        home: Home | None,
        shared: SharedReplica | None,
    ) -> tuple[str, ReplicaStream]:
        """Places, books and sends. Tries again if the placer names a replica whose loss it has not heard of yet."""
        token_ids = _cached_as(request.prompt_ids + request.output_ids, request.prefix_salt)
        limit = max(1, request.sampling.max_tokens - len(request.output_ids))
        unreachable = set(lost)
        for _ in range(MAX_PLACE_TRIES):
            exclude = frozenset(unreachable - self.replicas.ready)
            place = self._placer.place if shared is None else partial(self._place_on_shared, shared)
            self._placing += 1
            try:
                replica_id = await place(request.request_id, token_ids, exclude, refused, home, limit)
            finally:
                self._placing -= 1
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

    async def _place_on_shared(
        self,
        shared: SharedReplica,
        request_id: str,
        token_ids: list[int],
        exclude: frozenset[str],
        refused: frozenset[str],
        home: Home | None,
        output_limit: int | None,
    ) -> str:
        """Books the sequence on the replica of the others, or where the placer says if that one is gone or full."""
        async with shared.choosing:
            if shared.id in self.replicas.ready - exclude - refused:
                with contextlib.suppress(NoReplica):
                    return self._fleet.place(request_id, token_ids, [shared.id], output_limit=output_limit).replica_id
            shared.id = await self._placer.place(request_id, token_ids, exclude, refused, home, output_limit)
            return shared.id


class _Clock:
    """Measures the latencies of one run of a sequence."""

    def __init__(self, times: ReplicaTimes, arrived: float, prompt_tokens: int, output_tokens: int) -> None:
        """`output_tokens`: those that it had when the run began; a run that has some resumes it."""
        self._times = times
        self._arrived = arrived
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens
        self._resumed = output_tokens > 0
        self._computing = perf_counter()  # from when on its prompt is computed, once it is known
        self._first: float | None = None
        self._last: float | None = None

    @property
    def last(self) -> float | None:
        """When the last tokens came; None if none did."""
        return self._last

    def first_token(self, output: Output) -> bool:
        """Records the output. Returns whether it brought the first token of this run."""
        now = perf_counter()
        first = self._last is None
        if output.queue_s is not None:
            self._times.queue.observe(output.queue_s)
            self._computing += output.queue_s
            if not self._resumed:
                self._times.prompt_tokens.observe(self._prompt_tokens)
        count = len(output.token_ids)
        if count:
            self._output_tokens += count
            if self._last is not None:
                self._times.inter_token.observe((now - self._last) / count, count)
            else:
                self._first = now
                self._times.prefill.observe(max(0.0, now - self._computing))
                if not self._resumed:
                    self._times.first_token.observe(now - self._arrived)
            self._last = now
        if output.finish_reason is not None:
            self._times.request.observe(now - self._arrived)
            self._times.output_tokens.observe(self._output_tokens)
            if self._first is not None:
                self._times.decode.observe(now - self._first)
        return first and count > 0


def _cached_as(token_ids: list[int], cache_salt: str) -> list[int]:
    """The tokens as the replicas' caches have them."""
    if not cache_salt:
        return token_ids
    found: list[int] = salted(token_ids, cache_salt).tolist()
    return found


def _failed(failure: Failure | None, request_id: str) -> ApiError:
    """The client's error for a replica's failure."""
    if failure is None or failure.kind == "internal":
        log.error("%s: failed on its replica: %s", request_id, failure, extra={"sequence": request_id})
        return internal()
    if failure.kind == "unavailable":
        return ApiError(503, failure.message, code="unavailable", headers={"Retry-After": "2"})
    return invalid(failure.message, failure.param, "invalid_value")


def _overloaded(failures: Iterable[Failure]) -> ApiError:
    """The error for a request that full replicas refused. The client may retry when the first of them is likely to have
    room."""
    first = min(failures, key=lambda failure: failure.retry_after_s or 0.0)
    return busy(first.message, first.retry_after_s or 0.0)
