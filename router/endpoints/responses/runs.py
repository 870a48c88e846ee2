"""Responses that outlive their request: kept on disk, and made in the background.

All work of the disk is done in threads, never in the event loop. Clients have turns there, and each kind of work has
threads and connections of its own: a client that reads or writes much keeps no response from its beats.
"""

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from router.access.shares import Shares
from router.config import RouterConfig
from router.endpoints.responses.store import LOST, STALE_S, Position, ResponseStore, StoredResponse, StoreFull
from router.endpoints.responses.writer import ResponsesFormat, written
from router.generation import Generation
from router.metrics import request_log
from router.streaming.sse import Emit
from router.wire.errors import ApiError, internal
from router.wire.responses_objects import ResponseFailed
from worker.client_turns import ClientTurns

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Work = Callable[[ResponseStore], Result]

READER_THREADS = 2
BEAT_S = 0.25  # also how long events of a background response wait for each other
POLL_S = 0.1
MAX_READ_EVENTS = 512  # in one read
SEPARATOR = b"\n\n"
LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")


class KeptResponses:
    """The store of a router, for its event loop. False where the router keeps no responses. The file is opened when it
    is first needed, by all connections at once. `news`: of what runs in the background."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._opening = threading.Lock()
        self._readers, self._writer, self._beater = _Lane(READER_THREADS), _Lane(1), _Lane(1)
        self._lanes = self._readers, self._writer, self._beater
        self.news = News(self)

    def __bool__(self) -> bool:
        return self._config.response_store_dir is not None and self._config.response_store_bytes > 0

    async def read(self, tenant: str, work: Work[Result]) -> Result:
        """Returns what `work` makes of the store, in the tenant's turn. Raises ApiError (503) where the disk fails."""
        return await self._run(self._readers, tenant, work)

    async def write(self, tenant: str, work: Work[Result]) -> Result:
        """As `read`, for what changes the store. Raises ApiError also (429) where it is full."""
        return await self._run(self._writer, tenant, work)

    async def beat(self, tenant: str, work: Work[Result]) -> Result:
        """As `write`, for what runs in the background: it waits for nothing else."""
        return await self._run(self._beater, tenant, work)

    async def keep(self, tenant: str, stored: StoredResponse) -> None:
        """Keeps a response that is complete. Where the disk fails, the client has its answer all the same."""
        with contextlib.suppress(ApiError):
            await self.write(tenant, lambda store: store.put(tenant, stored))

    async def close(self) -> None:
        self.news.close()
        for lane in self._lanes:
            lane.turns.close()
            await asyncio.to_thread(lane.turns.wait)
            for store in lane.free:
                store.close()

    async def _run(self, lane: "_Lane", tenant: str, work: Work[Result]) -> Result:
        try:
            return await lane.turns.run(tenant, lambda: self._use(lane, work))
        except StoreFull:
            message = "Your responses that run in the background take all that they may of the store; try again later."
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": "5"}) from None
        except (sqlite3.Error, OSError):
            log.exception("the store of responses fails")
            message = "The store of responses cannot be read or written now; it has been logged."
            raise ApiError(503, message, code="store_unavailable", headers={"Retry-After": "2"}) from None

    def _use(self, lane: "_Lane", work: Work[Result]) -> Result:
        with self._opening:
            for each in self._lanes:
                while each.missing:
                    each.free.append(self._open())
                    each.missing -= 1
            store = lane.free.pop()
        try:
            return work(store)
        finally:
            lane.free.append(store)

    def _open(self) -> ResponseStore:
        config = self._config
        assert config.response_store_dir is not None
        return ResponseStore(config.response_store_dir, config.response_store_bytes, config.response_store_age_s)


class _Lane:
    """Threads for one kind of work, and a connection for each. `missing`: connections that are not open yet."""

    def __init__(self, threads: int) -> None:
        self.turns = ClientTurns(threads, "responses")
        self.free: list[ResponseStore] = []
        self.missing = threads


class News:
    """Wakes those who follow responses in the background: at once for those of this router, whose `_Run` says what it
    has kept; for those of others, one look at the store after the other is for all of them."""

    def __init__(self, kept: KeptResponses) -> None:
        self._kept = kept
        self._here: dict[str, int] = {}  # the last event that is kept of each response that this router makes
        self._waiting: dict[tuple[str, str], list[tuple[int, asyncio.Future[None]]]] = {}
        self._looking: asyncio.Task[None] | None = None

    def begin(self, response_id: str) -> None:
        self._here[response_id] = -1

    def tell(self, tenant: str, response_id: str, last: int) -> None:
        self._here[response_id] = last
        self._wake((tenant, response_id), last)

    def end(self, tenant: str, response_id: str) -> None:
        self._here.pop(response_id, None)
        self._wake((tenant, response_id))

    async def wait(self, tenant: str, response_id: str, after: int) -> None:
        """Returns when there may be an event after the one numbered `after`, or none will come any more."""
        last = self._here.get(response_id)
        if last is not None and last > after:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        followers = self._waiting.setdefault((tenant, response_id), [])
        followers.append((after, future))
        if last is None and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())
        try:
            await future
        finally:
            followers.remove((after, future))
            if not followers and self._waiting.get((tenant, response_id)) is followers:
                del self._waiting[tenant, response_id]

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def _wake(self, response: tuple[str, str], last: int | None = None, error: ApiError | None = None) -> None:
        for after, future in self._waiting.get(response, ()):
            if not future.done() and (last is None or last > after):
                future.set_result(None) if error is None else future.set_exception(error)

    async def _look(self) -> None:
        """Looks as long as a client follows a response of another router."""
        while True:
            await asyncio.sleep(POLL_S)
            asked = [response for response in self._waiting if response[1] not in self._here]
            if not asked:
                return
            try:
                found = await self._kept.read("", lambda store: [store.position(*response) for response in asked])  # noqa: B023
            except ApiError as error:
                for response in asked:
                    self._wake(response, error=error)
                continue  # others have come meanwhile
            for response, position in zip(asked, found, strict=True):
                self._wake(response, None if position is None or position.has_ended else position.last)


class BackgroundRuns:
    """The responses that this router makes in the background."""

    def __init__(self, kept: KeptResponses, limit: int) -> None:
        self._kept = kept
        self._limit = limit
        self._slots = Shares(limit)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def start(
        self, tenant: str, stored: StoredResponse, generation: Generation, form: ResponsesFormat, keeps_events: bool
    ) -> None:
        """Begins a response. Raises ApiError (429) where too many run, or too many of this client's (`Shares`).
        `keeps_events`: for clients that follow it."""
        if self._slots.taken >= self._limit or not self._slots.has_room(tenant, 1):
            message = f"{self._slots.taken} of at most {self._limit} responses run in the background"
            message += ", and more of this client's would take the others' share; try again later."
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": "5"})
        self._slots.take(tenant, 1)
        name = stored.response.id
        run = _Run(self._kept, tenant, stored, generation, form, keeps_events)
        self._running[name] = task = asyncio.create_task(self._begin(run))
        generation.ticket.kept = True
        told = request_log.current()

        def ended(_: object) -> None:
            self._running.pop(name, None)
            self._slots.give(tenant, 1)
            generation.ticket.end()
            if told is not None:
                told.write()

        task.add_done_callback(ended)
        try:
            await asyncio.shield(run.is_kept)
        except asyncio.CancelledError:  # the client has gone before it knew the id
            task.cancel()
            raise

    async def stop(self, response_id: str) -> None:
        """Ends what runs, if this router makes it."""
        task = self._running.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        for name in list(self._running):
            await self.stop(name)

    async def _begin(self, run: "_Run") -> None:
        try:
            await run.run()
        except ApiError as error:
            if not run.is_kept.done():
                run.is_kept.set_exception(error)
        except Exception:
            log.exception("%s failed in the background", run.name)
            if not run.is_kept.done():
                run.is_kept.set_exception(internal())
        finally:
            run.is_kept.cancel()  # unless it is done


class _Run:
    """A response in the background. `is_kept`: done once the store has it."""

    def __init__(
        self,
        kept: KeptResponses,
        tenant: str,
        stored: StoredResponse,
        generation: Generation,
        form: ResponsesFormat,
        keeps_events: bool,
    ) -> None:
        self.name = stored.response.id
        self.is_kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept = kept
        self._tenant = tenant
        self._stored = stored
        self._generation = generation
        self._form = form
        self._keeps_events = keeps_events
        self._events: list[tuple[int, bytes]] = []
        self._number = 0
        self._beaten_s = monotonic()

    async def run(self) -> None:
        kept, news = self._kept, self._kept.news
        await kept.write(self._tenant, lambda store: store.put(self._tenant, self._stored))
        news.begin(self.name)
        self.is_kept.set_result(None)
        try:
            if await self._make():
                ending = asyncio.ensure_future(self._keep_end())
                while not ending.done():  # a stop that comes now is too late
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([ending])
                ending.result()
        finally:
            news.end(self._tenant, self.name)

    async def _keep_end(self) -> None:
        """Keeps the response as it has ended. Raises ApiError if that fails until others take it as lost."""
        while True:
            try:
                end = self._kept.beat(self._tenant, lambda store: store.put(self._tenant, self._stored, new=False))
                return await end
            except ApiError as error:
                if not self._may_try_again(error):
                    raise
            await asyncio.sleep(BEAT_S)

    async def _make(self) -> bool:
        """Makes the response, and keeps its events. Returns whether it is still wanted."""
        work = asyncio.create_task(self._generation.stream(self._take))
        try:
            while not (await asyncio.wait([work], timeout=BEAT_S))[0]:
                if not await self._beat():
                    return False
            error = work.exception()
            if error is not None:
                await self._take(self._form.failed(_known(error, self.name)))
            while await self._beat() and self._events:  # the disk has failed for a moment
                await asyncio.sleep(BEAT_S)
        except asyncio.CancelledError:  # by a client, who has said so to the store, or because the router ends
            self._stored.response.status, self._stored.response.error = "failed", LOST
        except ApiError as error:  # of the store
            self._form.failed(error)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        return True

    async def _take(self, data: bytes) -> None:
        if self._keeps_events:
            for event in data.split(SEPARATOR)[:-1]:
                self._events.append((self._number, event + SEPARATOR))
                self._number += 1

    async def _beat(self) -> bool:
        """Whether the response is still wanted. Where the disk fails for a moment, its events are kept later."""
        events, self._events = self._events, []
        status = "queued" if self._stored.response.status == "queued" else "in_progress"
        try:
            is_wanted = await self._kept.beat(self._tenant, lambda store: store.beat(self.name, status, events))
        except ApiError as error:
            if not self._may_try_again(error):
                raise
            self._events = events + self._events
            return True
        self._beaten_s = monotonic()
        if is_wanted and events:
            self._kept.news.tell(self._tenant, self.name, events[-1][0])
        return is_wanted

    def _may_try_again(self, error: ApiError) -> bool:
        return error.status == 503 and monotonic() <= self._beaten_s + STALE_S  # others take it as lost then


async def follow(kept: KeptResponses, tenant: str, response_id: str, after: int, emit: Emit) -> None:
    """Emits the events of a response that has been begun as a stream in the background, by this router or another,
    after the one numbered `after`, until there will be no more."""

    def read(store: ResponseStore) -> tuple[Position | None, list[tuple[int, bytes]]]:
        position = store.position(tenant, response_id)
        has_more = position is not None and position.last > after
        return position, store.events(response_id, after, MAX_READ_EVENTS) if has_more else []

    last = b": no more events\n\n"
    emitted = False
    while True:
        position, events = await kept.read(tenant, read)
        if events:
            after, last = events[-1]
            emitted = True
            await emit(b"".join(data for _, data in events))
            continue
        if position is None or position.has_ended:
            break
        await kept.news.wait(tenant, response_id, after)
    response = None
    if position is not None and position.status == "failed" and not last.startswith(LAST_EVENTS):
        response = await kept.read(tenant, lambda store: store.response(tenant, response_id))
    if response is not None:
        await emit(written(ResponseFailed(sequence_number=after + 1, response=response)))
    elif not emitted:
        await emit(last)


def _known(error: BaseException, name: str) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("%s failed in the background", name, exc_info=error)
    return internal()
