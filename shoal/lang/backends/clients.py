"""Clients of other packages: one for each event loop, since connections belong to one loop."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from shoal.lang.errors import BackendError

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
    """Clients of `module`, the package openai or anthropic, as `make` makes them: one for each event loop that asks.
    The first is made at once, so that a missing key is said where the backend is made. `code`: the attribute of the
    package's errors that says of what kind they are."""

    def __init__(self, module: Any, make: Callable[[], Any], code: str) -> None:
        self._module = module
        self._make = make
        self._code = code
        self._spare: Any = make()
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    @property
    def url(self) -> str:
        """The endpoint's URL, as errors name it."""
        return str(self.get().base_url).rstrip("/")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raises the package's errors as BackendError."""
        try:
            yield
        except self._module.APIStatusError as error:
            message = f"{self.url} answers {error.status_code}: {error.message}"
            raise BackendError(message, error.status_code, getattr(error, self._code, None)) from error
        except self._module.APIConnectionError as error:
            raise BackendError(f"{self.url} cannot be reached: {error.__cause__ or error}") from error
        except self._module.APIError.__base__ as error:  # OpenAIError or AnthropicError
            raise BackendError(f"{self.url}: {error}", code=getattr(error, self._code, None)) from error

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
