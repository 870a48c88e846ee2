"""Clients of other packages: one for each event loop, since connections belong to one loop."""

import asyncio
from collections.abc import Callable
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

MAX_RETRIES = 8  # of a call that a busy endpoint refuses: the packages wait as long as it says, or longer each time


def package(name: str) -> Any:
    """An installed package. Raises ImportError with the command that installs it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"this backend needs the package {name}: pip install {name}", name=name) from error


class Clients:
    """Clients that `make` makes, one for each event loop that asks. The first is made at once, so that a missing key is
    said where the backend is made."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._spare: Any = make()
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    def get(self) -> Any:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._of_loop:
            self._of_loop[loop], self._spare = self._spare or self._make(), None
        return self._of_loop[loop]

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        client = self._of_loop.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()
