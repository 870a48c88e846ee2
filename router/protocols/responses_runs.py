"""Responses that outlive their request: kept on disk, and made in the background.

All work of the disk is done in one thread, never in the event loop.
"""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router import request_log
from router.config import RouterConfig
from router.errors import ApiError, internal
from router.generation import Generation
from router.protocols.response_store import LOST, ResponseStore, StoredResponse
from router.protocols.responses_objects import ResponseFailed
from router.protocols.responses_writer import ResponsesFormat, written
from router.shares import Shares
from router.sse import Emit

log = logging.getLogger(__name__)

Result = TypeVar("Result")

BEAT_S = 0.25  # also how long events of a background response wait for each other
POLL_S = 0.1
EVENTS = 512  # in one read
SEPARATOR = b"\n\n"
LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")


class KeptResponses:
    """The store of a router, for its event loop. False where the router keeps no responses. The file is opened when it
    is first needed."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(1, "responses")
        self._store: ResponseStore | None = None

    def __bool__(self) -> bool:
        return self._config.response_store_dir is not None and self._config.response_store_bytes > 0

    async def run(self, work: Callable[[ResponseStore], Result]) -> Result:
        """Returns what `work` makes of the store, in its thread. Raises ApiError (503) where the disk fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(self._opened()))
        except (sqlite3.Error, OSError):
            log.exception("the store of responses fails")
            message = "The store of responses cannot be read or written now; it has been logged."
            raise ApiError(503, message, code="store_unavailable", headers={"Retry-After": "2"}) from None

    async def keep(self, tenant: str, stored: StoredResponse) -> None:
        """Keeps a response that is complete. Where the disk fails, the client has its answer all the same."""
        with contextlib.suppress(ApiError):
            await self.run(lambda store: store.put(tenant, stored))

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, store.close)
        self._threads.shutdown(wait=False)

    def _opened(self) -> ResponseStore:
        if self._store is None:
            config = self._config
            assert config.response_store_dir is not None
            self._store = ResponseStore(
                config.response_store_dir, config.response_store_bytes, config.response_store_age_s
            )
        return self._store


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

    async def run(self) -> None:
        await self._kept.run(lambda store: store.put(self._tenant, self._stored))
        self.is_kept.set_result(None)
        work = asyncio.create_task(self._generation.stream(self._take))
        try:
            while not (await asyncio.wait([work], timeout=BEAT_S))[0]:
                if not await self._beat():
                    return
            error = work.exception()
            if error is not None:
                await self._take(self._form.failed(_known(error, self.name)))
            await self._beat()
        except asyncio.CancelledError:  # by a client, who has said so to the store, or because the router ends
            self._stored.response.status, self._stored.response.error = "failed", LOST
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await self._kept.run(lambda store: store.put(self._tenant, self._stored, new=False))

    async def _take(self, data: bytes) -> None:
        if self._keeps_events:
            for event in data.split(SEPARATOR)[:-1]:
                self._events.append((self._number, event + SEPARATOR))
                self._number += 1

    async def _beat(self) -> bool:
        """Whether the response is still wanted."""
        events, self._events = self._events, []
        status = "queued" if self._stored.response.status == "queued" else "in_progress"
        return await self._kept.run(lambda store: store.beat(self.name, status, events))


async def follow(kept: KeptResponses, tenant: str, response_id: str, after: int, emit: Emit) -> None:
    """Emits the events of a response that has been begun as a stream in the background, by this router or another,
    after the one numbered `after`, until there will be no more."""

    def read(store: ResponseStore) -> tuple[StoredResponse | None, list[tuple[int, bytes]]]:
        return store.get(tenant, response_id), store.events(response_id, after, EVENTS)

    last = b": no more events\n\n"
    emitted = False
    while True:
        stored, events = await kept.run(read)
        if events:
            after, last = events[-1]
            emitted = True
            await emit(b"".join(data for _, data in events))
            continue
        if stored is None or stored.has_ended:
            break
        await asyncio.sleep(POLL_S)
    if stored is not None and stored.response.status == "failed" and not last.startswith(LAST_EVENTS):
        await emit(written(ResponseFailed(sequence_number=after + 1, response=stored.response)))
    elif not emitted:
        await emit(last)


def _known(error: BaseException, name: str) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("%s failed in the background", name, exc_info=error)
    return internal()
