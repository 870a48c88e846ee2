"""Programs are plain functions, yet thousands run at once in one thread: each in a greenlet on an event loop.

When a program reads a variable that is not there yet, its greenlet gives the thread back to the loop, and is resumed
once the variable is set. A waiting program costs its stack and nothing else: there is no thread for a program.

| caller | how it waits |
| --- | --- |
| a program | `wait` switches to the loop |
| any other thread (a script, a notebook) | `wait` blocks it; the loop runs in a thread of its own |
| a coroutine | it awaits |
"""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Tools of as many programs block at the same time; asyncio's own pool has few more threads than the machine has cores.
TOOL_THREADS = 1024
SLOW_S = 1.0  # a program that computes for longer than this without waiting is named: all others stand still


class _ProgramGreenlet(greenlet):
    """The greenlet of a program. Its parent is the greenlet of the task that drives it."""


# Called instead of a function that `in_thread` is given, where no tool is to be called.
without_threads: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("without", default=None)

_tools = ThreadPoolExecutor(TOOL_THREADS, "shoal-tool")  # starts a thread only if none is idle
_lock = threading.Lock()
_background: asyncio.AbstractEventLoop | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """The event loop of callers that have none, in a daemon thread, started at the first call."""
    global _background
    with _lock:
        if _background is None:
            _background = asyncio.new_event_loop()
            threading.Thread(target=_background.run_forever, name="shoal-programs", daemon=True).start()
        return _background


async def run_in_greenlet(function: Callable[..., Result], *arguments: Any, name: str = "program") -> Result:
    """Calls a plain function, in which `wait` gives way to the event loop. Raises what it raises."""
    child = _ProgramGreenlet(function)
    child.gr_context = contextvars.copy_context()
    outcome: Any = None
    error: BaseException | None = None
    first = True
    while True:
        begun = perf_counter()
        child.parent = getcurrent()
        if error is not None:
            step = child.throw(error)
        elif first:
            step = child.switch(*arguments)
        else:
            step = child.switch(outcome)
        first, error = False, None
        if (spent := perf_counter() - begun) > SLOW_S:
            log.warning(
                "%s held up all programs for %.1f s: run what takes long in a thread, shoal.in_thread(function, ...)",
                name,
                spent,
            )
        if child.dead:
            return step
        try:
            outcome = await step
        except BaseException as raised:
            error = raised


def wait(awaitable: Coroutine[Any, Any, Result], loop: asyncio.AbstractEventLoop) -> Result:
    """The result of a coroutine that must run on `loop`, for callers that cannot await. Raises RuntimeError in a
    coroutine on that loop."""
    current = getcurrent()
    if isinstance(current, _ProgramGreenlet):
        assert current.parent is not None
        return current.parent.switch(awaitable)
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        awaitable.close()
        raise RuntimeError("this would block the event loop: a coroutine awaits, with s.get(name) or run_async(...)")
    future = asyncio.run_coroutine_threadsafe(awaitable, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def in_program() -> bool:
    """Whether the caller is a program's function."""
    return isinstance(getcurrent(), _ProgramGreenlet)


def in_thread(function: Callable[..., Result], *arguments: Any, **keywords: Any) -> Result:
    """Calls a function that blocks, such as a tool's HTTP request, without holding up other programs. Outside of a
    program it is a plain call. A program that is being traced ends there: tools are for programs that run."""
    if (refuse := without_threads.get()) is not None:
        refuse()
    if not in_program():
        return function(*arguments, **keywords)
    parent = getcurrent().parent
    assert parent is not None
    call = partial(contextvars.copy_context().run, function, *arguments, **keywords)
    return parent.switch(asyncio.get_running_loop().run_in_executor(_tools, call))
