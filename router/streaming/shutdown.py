"""Ends that come to answers from outside; and that of all answers of a router, whose server ends, or its machine."""

import asyncio

from router.wire.errors import ApiError


class EarlyEnd:
    """Ends answers, each with an error that its client can act on. For use in the event loop that serves.

    | attribute | meaning |
    | --- | --- |
    | `has_come` | whether `come` was called: no answer goes on |
    """

    def __init__(self) -> None:
        self.has_come = False
        self._watches: set[asyncio.Task[None]] = set()

    def watch(self, task: asyncio.Task[None]) -> None:
        """Has a task cancelled when the end comes. It has not come yet."""
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    def come(self) -> None:
        self.has_come = True
        for task in self._watches:
            task.cancel()

    def error(self) -> ApiError:
        """The error that answers end with."""
        raise NotImplementedError


class Shutdown(EarlyEnd):
    """The end of all answers of a router."""

    def error(self) -> ApiError:
        message = "The server that answered ends, or its machine: send the request again."
        return ApiError(503, message, code="server_ends", headers={"Retry-After": "2"})
