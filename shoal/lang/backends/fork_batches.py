"""Forks that begin at the same time, as one request.

The branches of a fork make their first calls in the same turn of the event loop. Those with the same parameters travel
together: the text that they share is sent, tokenised and placed once, and all start in one step of the model. Each
branch goes on as soon as its own answer has ended.
"""

import asyncio
import json
import os.path
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from shoal.lang.backend import Call, Generated
from shoal.lang.errors import BackendError

Body = dict[str, Any]
One = Callable[[Call, Body], Awaitable[Generated]]
Many = Callable[[Sequence[Call], str, Body], AsyncGenerator[tuple[int, Generated], None]]


class ForkBatches:
    """Gathers calls that begin branches. `one` runs a call by itself; `many` runs calls whose new texts begin with a
    common one, and yields their numbers and results as they end. `tasks` are those of the batches that run; a batch
    ends a little later than its last answer."""

    def __init__(self, one: One, many: Many) -> None:
        self._one = one
        self._many = many
        self._open: dict[Any, _ForkBatch] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def generate(self, call: Call, body: Body) -> Generated:
        """The result of a call that begins a branch: one without earlier text, or the first after a fork. `body`: its
        parameters, as the server takes them. Raises BackendError."""
        loop = asyncio.get_running_loop()
        key = loop, call.program, call.parent, call.held, json.dumps(body, sort_keys=True)
        if key not in self._open:
            self._open[key] = _ForkBatch(body)
            loop.call_soon(self._close, key)
        batch = self._open[key]
        answer: asyncio.Future[Generated] = loop.create_future()
        batch.calls.append(call)
        batch.answers.append(answer)
        try:
            return await answer
        finally:
            # A batch whose answers have all come is left alone: the end of its stream frees the connection.
            if answer.cancelled() and batch.is_over and batch.task is not None:
                batch.task.cancel()

    def _close(self, key: Any) -> None:
        batch = self._open.pop(key)
        if batch.is_over:
            return
        batch.task = asyncio.ensure_future(self._run(batch))
        self.tasks.add(batch.task)
        batch.task.add_done_callback(self.tasks.discard)

    async def _run(self, batch: "_ForkBatch") -> None:
        try:
            common = _common(batch.calls)
            if common is not None:
                try:
                    async with aclosing(self._many(batch.calls, common, batch.body)) as results:
                        async for number, result in results:
                            batch.resolve(number, result)
                except BackendError as error:
                    if error.status is not None:
                        raise
                    # The stream broke off: what has not ended is asked for again, each by itself.
            await asyncio.gather(*(self._alone(batch, number) for number in range(len(batch.calls))))
        except Exception as error:
            for answer in batch.answers:
                if not answer.done():
                    answer.set_exception(error)

    async def _alone(self, batch: "_ForkBatch", number: int) -> None:
        answer = batch.answers[number]
        if answer.done():
            return
        try:
            batch.resolve(number, await self._one(batch.calls[number], batch.body))
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)


class _ForkBatch:
    """Calls with the same parameters, with their answers to be."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.calls: list[Call] = []
        self.answers: list[asyncio.Future[Generated]] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether no caller waits any more."""
        return all(answer.done() for answer in self.answers)

    def resolve(self, number: int, result: Generated) -> None:
        if not self.answers[number].done():
            self.answers[number].set_result(result)


def _common(calls: Sequence[Call]) -> str | None:
    """The text with which the new texts of all calls begin; None if they are to run apart, since they are one, or share
    less than half of their texts."""
    if len(calls) == 1:
        return None
    held = calls[0].held
    texts = [call.text[held:] for call in calls]
    common = os.path.commonprefix(texts)  # noqa: RUF071 - of characters
    return common if held or 2 * len(common) >= min(map(len, texts)) else None
