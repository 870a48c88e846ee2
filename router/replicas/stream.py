"""The outputs of one request at a replica, as its reader gets them."""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from worker.messages import Output


class ReplicaLost(Exception):
    """The replica of a stream is gone. `taken_away`: on purpose; it did not die."""

    def __init__(self, replica_id: str, taken_away: bool = False) -> None:
        super().__init__(f"replica {replica_id} {'was taken away' if taken_away else 'is gone'}")
        self.replica_id = replica_id
        self.taken_away = taken_away


class ReaderTooSlow(Exception):
    """The stream was stopped because its outputs are not read. Raised once all earlier outputs have been read."""


class ReplicaStream:
    """The outputs of one request, as an async iterator for one reader. Must be closed, finished or not.

    Waiting outputs are merged into one, so a reader that falls behind gets fewer and longer outputs.
    """

    def __init__(self, request_id: str, abort: Callable[[list[str]], None]) -> None:
        """`abort`: tells the replica to stop requests."""
        self.request_id = request_id
        self._abort = abort
        self._outputs: deque[Output] = deque()
        self._error: Exception | None = None
        self._done = False
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self.unread_tokens = 0

    def feed(self, output: Output) -> None:
        self._outputs.append(output)
        self.unread_tokens += len(output.token_ids)
        self._done = output.finish_reason is not None
        self._notify()

    def fail(self, error: Exception) -> None:
        """Ends the stream with `error`, which is raised to the reader after all earlier outputs."""
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def __aiter__(self) -> "ReplicaStream":
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._done:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._wake = self._loop.create_future()
            await self._wake
        output = self._outputs.popleft()
        while self._outputs:
            output = merged(output, self._outputs.popleft())
        self.unread_tokens = 0
        return output

    def close(self) -> None:
        """Ends the stream. Tells the replica to stop the request if it is still running."""
        if not self._done and self._error is None:
            self._abort([self.request_id])


def merged(first: Output, second: Output) -> Output:
    """Merges two consecutive outputs into one."""
    return msgspec.structs.replace(
        first,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
        stop_token_id=second.stop_token_id,
        failure=second.failure,
        num_drafted=first.num_drafted + second.num_drafted,
        num_accepted=first.num_accepted + second.num_accepted,
        check=second.check or first.check,
    )
