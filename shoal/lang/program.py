"""Programs and the ways to run them: one run, a stream, a batch; from scripts, programs and coroutines."""

import asyncio
import dataclasses
import inspect
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from functools import partial
from typing import Any, Self, TypeVar

from shoal.lang import loop
from shoal.lang.backend import Backend
from shoal.lang.branch import ProgramRun
from shoal.lang.interpreter import Interpreter
from shoal.lang.ir import GenParams, gen_params
from shoal.lang.state import ProgramState
from shoal.lang.tracer import ProgramGraph, trace

log = logging.getLogger(__name__)

Result = TypeVar("Result")

AUTO_STATES = 256  # programs of a batch at once, by default: as many as keep a replica's batch full


class GlobalConfig:
    """Settings of the language. `default_backend`: where programs run that name no backend."""

    def __init__(self) -> None:
        self.default_backend: Backend | None = None


global_config = GlobalConfig()


def set_default_backend(backend: Any) -> None:
    """The backend of programs that name none."""
    global_config.default_backend = resolved_backend(backend)


def resolved_backend(backend: Any) -> Backend:
    """A backend, that of an object with an `endpoint`, or the default one. Raises ValueError if there is none."""
    backend = getattr(backend, "endpoint", backend)
    backend = global_config.default_backend if backend is None else backend
    if backend is None:
        raise ValueError("there is no backend: call shoal.set_default_backend(...), or pass backend=...")
    if not isinstance(backend, Backend):
        raise TypeError(f"{backend!r} is not a backend")
    return backend


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The plan of a batch: `order` has the numbers of its programs as they start. `shared` counts the programs of the
    batch that have a text, by statement and text."""

    order: Sequence[int]
    shared: Counter[tuple[int, str]] = dataclasses.field(default_factory=Counter)


class Program:
    """A program: a function whose first parameter is the state `s`. May be a coroutine function.

    `num_api_spec_tokens`: with endpoints that are paid by the call, each call generates at least this many tokens, past
    its stop, and later calls are served from them where they fit.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        self._signature = inspect.signature(func)
        parameters = list(self._signature.parameters.values())
        if not parameters or parameters[0].name != "s":
            raise ValueError(f"the first parameter of {func.__name__} must be s, the state")
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bound = dict(bound or {})
        self.arg_names = [parameter.name for parameter in parameters[1:]]
        self.__name__ = func.__name__
        self.__doc__ = func.__doc__

    def bind(self, **arguments: Any) -> Self:
        """The program with some of its arguments given. Raises TypeError for an argument that it does not have."""
        for name in arguments:
            if name not in self.arg_names:
                known = ", ".join(self.arg_names) or "none"
                raise TypeError(f"{self.__name__} has no argument {name!r}; it has {known}")
        return type(self)(self.func, self.num_api_spec_tokens, self.bound | arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        return self.run(*args, **kwargs)

    def run(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> ProgramState:
        """Runs the program to its end, and returns its state. Raises ProgramError.

        Keyword arguments that are sampling parameters (see `SAMPLING`) are the defaults of the program's calls; the
        others are the program's own. `stream`: returns at once; read the state's `text_iter`.
        """
        return waited(self.run_async(*args, stream=stream, backend=backend, **kwargs))

    async def run_async(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> ProgramState:
        """As `run`, in the caller's event loop."""
        state = await self._start(args, kwargs, stream, backend)
        return state if stream else await self._finished(state)

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Any = None,
        **sampling: Any,
    ) -> Any:
        """Runs the program once for each of `batch_kwargs` (keyword arguments, or positional ones), and returns the
        states in order. A program that fails does not end the others: its state has an `error()`, and reading what it
        did not reach raises it.

        `num_threads`: programs at once; the name is SGLang's, and no threads are involved. `progress_bar`: shows one in
        the terminal. `generator_style`: returns an iterator of the states in order instead of a list.
        """
        states = self._batch(batch_kwargs, num_threads, progress_bar, backend, sampling)
        if generator_style:
            return _iterated(states)
        return waited(_listed(states))

    async def run_batch_async(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        backend: Any = None,
        **sampling: Any,
    ) -> list[ProgramState]:
        """As `run_batch`, in the caller's event loop."""
        return await _listed(self._batch(batch_kwargs, num_threads, progress_bar, backend, sampling))

    def trace(self, **arguments: Any) -> ProgramGraph:
        """The graph of the program, as far as it can be known without running it. Runs the function on placeholders,
        with the arguments that are given."""
        return trace(self.func, self.bind(**arguments).bound)

    def cache(self, backend: Any = None) -> None:
        """Computes the constant text with which every run begins, so that the backend has it in its cache."""
        prefix = self.trace().prefix()
        if prefix:
            waited(resolved_backend(backend).prefetch("", prefix))

    # ------------------------------------------------------------ inside

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.arg_names):
            raise TypeError(f"{self.__name__} takes {len(self.arg_names)} arguments, and {len(args)} are given")
        given = self.bound | dict(zip(self.arg_names, args, strict=False)) | dict(kwargs)
        unknown = sorted(given.keys() - set(self.arg_names))
        if unknown:
            raise TypeError(
                f"{self.__name__} has no argument {unknown[0]!r}, and it is not a sampling parameter; it has "
                f"{', '.join(self.arg_names) or 'no arguments'}"
            )
        self._signature.bind(None, **given)  # raises TypeError for a missing one
        return given

    async def _plan_batch(self, calls: Sequence[Mapping[str, Any]], backend: Backend) -> "BatchPlan":
        return BatchPlan(range(len(calls)))

    async def _start(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        stream: bool,
        backend: Any,
        plan: "BatchPlan | None" = None,
    ) -> ProgramState:
        """A state on which the program has begun to run, in the task `state.run.task`."""
        sampling = {name: kwargs.pop(name) for name in list(kwargs) if name in SAMPLING and name not in self.arg_names}
        arguments = self._arguments(args, kwargs)
        where = resolved_backend(backend)
        defaults = _defaults(sampling)
        where.check(defaults)
        if self.num_api_spec_tokens is not None:
            where = where.speculating(self.num_api_spec_tokens)
        run = ProgramRun(where, defaults, arguments, stream, Interpreter)
        state = ProgramState(run.new_branch(), is_outside=True)
        run.task = asyncio.create_task(self._run(run, state, plan))
        return state

    async def _run(self, run: ProgramRun, state: ProgramState, plan: "BatchPlan | None") -> None:
        try:
            await self._run_function(run, state, plan)
            for branch in run.branches:
                branch.close()
            await run.finish()
        except Exception as error:
            run.fail(error, self.__name__)
        finally:
            run.cancel()
            await run.backend.end_program(run.id)

    async def _run_function(self, run: ProgramRun, state: ProgramState, plan: "BatchPlan | None") -> None:
        """Runs the program's own code on the branch of a state."""
        own = ProgramState(state._branch)
        if inspect.iscoroutinefunction(self.func):
            state.ret_value = await self.func(own, **run.arguments)
        else:
            call = partial(self.func, own, **run.arguments)
            state.ret_value = await loop.run_in_greenlet(call, name=self.__name__)

    async def _finished(self, state: ProgramState) -> ProgramState:
        run = state.run
        try:
            await asyncio.wait([run.task])
        finally:
            run.task.cancel()  # does nothing to one that has ended
        if run.error is not None:
            raise run.error
        return state

    def _batch(
        self,
        batch: Sequence[Mapping[str, Any] | Sequence[Any]],
        num_threads: int | str,
        progress_bar: bool,
        backend: Any,
        sampling: dict[str, Any],
    ) -> AsyncGenerator[ProgramState, None]:
        wrong = sorted(sampling.keys() - SAMPLING)
        if wrong:
            raise TypeError(f"run_batch has no parameter {wrong[0]!r}; the program's arguments go into batch_kwargs")
        if num_threads != "auto" and (not isinstance(num_threads, int) or num_threads < 1):
            raise ValueError(f"num_threads is {num_threads!r}; it may be 'auto' or a number from 1")
        calls = [  # all are checked before anything runs
            self._arguments((), entry) if isinstance(entry, Mapping) else self._arguments(tuple(entry), {})
            for entry in batch
        ]
        gate_size = AUTO_STATES if num_threads == "auto" else int(num_threads)

        async def states() -> AsyncGenerator[ProgramState, None]:
            gate = asyncio.Semaphore(gate_size)
            plan = await self._plan_batch(calls, resolved_backend(backend))

            async def one(arguments: dict[str, Any]) -> ProgramState:
                async with gate:
                    state = await self._start((), arguments | sampling, False, backend, plan)
                    try:
                        await asyncio.wait([state.run.task])
                    finally:
                        state.run.task.cancel()
                    return state

            started = {i: asyncio.create_task(one(calls[i])) for i in plan.order}
            tasks = [started[i] for i in range(len(calls))]
            errors = []
            try:
                with _progress(len(tasks), self.__name__) if progress_bar else nullcontext() as advance:
                    for task in tasks:
                        if advance is not None:
                            task.add_done_callback(advance)
                    for task in tasks:
                        state = await task
                        if state.run.error is not None:
                            errors.append(state.run.error)
                        yield state
            finally:
                for task in tasks:
                    task.cancel()
            if errors:
                log.warning("%d of %d programs failed; the first: %s", len(errors), len(tasks), errors[0])

        return states()


# Sampling parameters that `run` and `run_batch` take.
SAMPLING = frozenset(field.name for field in dataclasses.fields(GenParams)) - {"dtype", "regex", "json_schema", "n"}


def _defaults(sampling: dict[str, Any]) -> GenParams:
    given = {name: value for name, value in sampling.items() if value is not None}
    return gen_params(**({"max_new_tokens": 128, "temperature": 1.0, "top_p": 1.0} | given))


def waited(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine, for callers that cannot await. Raises RuntimeError in a coroutine on its loop."""
    return loop.wait(work, _loop())


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop() if loop.in_program() else loop.background_loop()


async def _listed(states: AsyncGenerator[ProgramState, None]) -> list[ProgramState]:
    async with aclosing(states):
        return [state async for state in states]


def _iterated(states: AsyncGenerator[ProgramState, None]) -> Iterator[ProgramState]:
    own = _loop()
    try:
        while (state := loop.wait(_next_of(states), own)) is not None:
            yield state
    finally:
        loop.wait(_closed(states), own)


async def _next_of(states: AsyncGenerator[ProgramState, None]) -> ProgramState | None:
    return await anext(states, None)


async def _closed(states: AsyncGenerator[ProgramState, None]) -> None:
    await states.aclose()


@contextmanager
def _progress(total: int, name: str) -> Iterator[Callable[[Any], None]]:
    """A progress bar; what it yields is called once for each program that has ended."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(name, total=total)
        yield lambda _: bar.advance(task)
