"""A run of a program with its branches. A branch is one line of text that grows, and the statements that wait there.

A program only appends expressions to branches, and never waits for that. A branch runs its expressions in order, in a
task that exists while there are any. So independent calls run at the same time, and when a call starts, the expressions
after it are often known already.

| thing | owner |
| --- | --- |
| text, messages, variables, waiting expressions | the `Branch` |
| the message that is being written | its `Interpreter` |
| ids, defaults, the first error | the `ProgramRun` |
| what is kept of a branch's text (`Branch.held` says how much) | the backend |
"""

import asyncio
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from shoal.lang.backend import Backend, RoleFormat
from shoal.lang.errors import ProgramError
from shoal.lang.ir import Expr, GenParams, names_set_by
from shoal.lang.statements import ForkPoint, Segment, Statement, Variable, place_of, program_line
from shoal.lang.timeline import CallRecord


class StatementExecutor(Protocol):
    """The executor of the statements of one branch."""

    async def execute(self, statement: Statement) -> None:
        """Runs a statement. Raises what it fails with."""
        ...

    def take_over(self, parent: Any) -> None:
        """Goes on where the executor of another branch is."""
        ...


class ProgramRun:
    """A run of a program on a backend, with all of its branches."""

    def __init__(
        self,
        backend: Backend,
        defaults: GenParams,
        arguments: dict[str, Any],
        stream: bool,
        executor: "Callable[[Branch], StatementExecutor]",
    ) -> None:
        """`executor` makes what runs the statements of a branch."""
        self.backend = backend
        self.executor = executor
        self.roles: RoleFormat | None = None  # asked for with the first message
        self.defaults = defaults
        self.arguments = arguments
        self.stream = stream
        self.loop = asyncio.get_running_loop()
        self.id = uuid.uuid4().hex
        self.branches: list[Branch] = []
        self.calls: list[CallRecord] = []
        self.error: BaseException | None = None
        self.task: asyncio.Task[None]  # in which the program's function runs
        self._numbers = itertools.count()

    def new_branch(self) -> "Branch":
        branch = Branch(self, len(self.branches))
        self.branches.append(branch)
        return branch

    def new_id(self) -> str:
        return str(next(self._numbers))

    async def finish(self) -> None:
        """Waits until all branches have run all their expressions."""
        for branch in self.branches:  # grows while forks are executed
            await branch.drained()

    def fail(self, error: Exception, name: str) -> None:
        """Records that the program's function has raised."""
        if not isinstance(error, ProgramError):
            place = place_of(error)
            error, cause = ProgramError(f"{place or name}: {type(error).__name__}: {error}"), error
            error.__cause__ = cause
        self.error = self.error or error
        for branch in self.branches:
            branch.error = branch.error or error
            branch.notify()

    def cancel(self) -> None:
        """Ends all calls that run; no more expressions will come."""
        for branch in self.branches:
            branch.cancel()
            branch.close()


class Branch:
    """A line of text, its messages and variables, and the expressions that wait to be run on it."""

    def __init__(self, run: ProgramRun, number: int) -> None:
        self.run = run
        self.number = number
        self.id = run.new_id()
        self.parent: str | None = None
        self.held = 0
        self.segments: list[Segment] = []
        self.text = ""
        self.messages: list[dict[str, Any]] = []
        self.variables: dict[str, Variable] = {}
        self.fork_start = 0
        self.error: BaseException | None = None
        self.pending: deque[Statement] = deque()  # what has not begun yet
        self._executor = run.executor(self)
        self._task: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._begun = True  # False until the parent has reached the fork
        self._closed = False

    # ------------------------------------------------------------ what programs do

    def submit(self, expr: Expr, place: str = "") -> None:
        """Appends an expression. Callable from any thread. Returns at once. `place` is the program's line, by default
        that of the caller."""
        statement = Statement(expr, place or program_line())
        for name in names_set_by(expr):
            self.variables[name] = Variable()
        if _on_loop(self.run.loop):
            self._enqueue(statement)
        else:
            self.run.loop.call_soon_threadsafe(self._enqueue, statement)

    def fork(self, size: int) -> "list[Branch]":
        """New branches that begin with what is here once all expressions so far have run."""
        children = [self.run.new_branch() for _ in range(size)]
        for child in children:
            child._begun = False
        self.submit(ForkPoint(tuple(children)))
        return children

    def close(self) -> None:
        """No more expressions will come."""
        self._closed = True
        self.notify()

    def set_variable(self, name: str, value: Any) -> None:
        self.variables[name] = Variable(value, done=True)

    async def get(self, name: str, to_the_end: bool = False) -> Any:
        """The value of a variable, once it is whole. Raises ProgramError if the branch has failed, and KeyError for a
        variable that no expression so far sets, or `to_the_end` of the program."""
        return (await self._variable(name, to_the_end)).value

    async def meta(self, name: str, to_the_end: bool = False) -> Any:
        """Details of a variable's generation (`Generated.meta`), as `get`."""
        return (await self._variable(name, to_the_end)).meta

    async def drained(self, to_the_end: bool = False) -> None:
        """Waits until `has_run`."""
        while not self.has_run(to_the_end):
            await self._changed()

    async def synced(self, to_the_end: bool = False) -> "Branch":
        """As `drained`, and raises the error of this branch."""
        await self.drained(to_the_end)
        if self.error is not None:
            raise self.error
        return self

    async def pieces(self, name: str | None) -> AsyncIterator[tuple[str, Any]]:
        """The text (or a variable's) as it grows, each piece with the variable's details so far. Of a backend with
        `incremental_streaming_output`, lists have what is new with the piece."""
        sent, told = 0, dict[str, int]()
        while True:
            variable = self.variables.get(name) if name is not None else None
            text = self.text if name is None else (variable.value if variable is not None else "")
            over = (variable is not None and variable.done) if name is not None else self.has_run(to_the_end=True)
            if isinstance(text, str) and len(text) > sent:
                new, sent = text[sent:], len(text)
                meta = variable.meta if variable is not None else None
                if self.run.backend.incremental_streaming_output and isinstance(meta, dict):
                    lists = {key: value for key, value in meta.items() if isinstance(value, list)}
                    meta = meta | {key: value[told.get(key, 0) :] for key, value in lists.items()}
                    told = {key: len(value) for key, value in lists.items()}
                yield new, meta
                continue  # the branch went on meanwhile
            if over or self.error is not None:
                break
            if name is not None and self.has_run(to_the_end=True):
                if name not in self.variables:
                    raise KeyError(self._unknown(name))
                break
            await self._changed()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self.pending.clear()
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------ the queue

    def _enqueue(self, statement: Statement) -> None:
        if self.error is not None:
            return
        self.pending.append(statement)
        self._start()

    def _start(self) -> None:
        if self._begun and self.pending and self._task is None:
            self._task = self.run.loop.create_task(self._work())

    async def _work(self) -> None:
        try:
            while self.pending:
                statement = self.pending.popleft()
                try:
                    await self._executor.execute(statement)
                except Exception as error:
                    self._fail(error, statement.place)
        finally:
            self._task = None
            self.notify()

    def _fail(self, error: Exception, place: str) -> None:
        if isinstance(error, ProgramError):
            self.error = error  # of another branch
        else:
            self.error = ProgramError(f"{place}: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        if self.run.error is None:
            self.run.error = self.error
        for statement in self.pending:
            if isinstance(statement.expr, ForkPoint):
                self.begin_children(statement.expr)
        self.pending.clear()

    def notify(self) -> None:
        """Wakes all who wait for a change."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _changed(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def has_run(self, to_the_end: bool = False) -> bool:
        """Whether everything so far has run, or something has failed. `to_the_end`: and nothing more will come."""
        is_idle = self._begun and not self.pending and self._task is None
        return self.error is not None or (is_idle and (self._closed or not to_the_end))

    async def _variable(self, name: str, to_the_end: bool) -> Variable:
        while True:
            variable = self.variables.get(name)
            if variable is not None and variable.done:
                return variable
            if self.error is not None:
                raise self.error
            if variable is None and self.has_run(to_the_end):
                raise KeyError(self._unknown(name))
            await self._changed()

    def _unknown(self, name: str) -> str:
        known = ", ".join(sorted(self.variables)) or "none"
        return f"the program sets no variable {name!r} here; it has {known}"

    # ------------------------------------------------------------ what expressions do

    def append(self, text: str, generated: bool = False, name: str | None = None) -> None:
        """Adds text, generated or not, of a variable or not."""
        if text:
            self.segments.append(Segment(text, generated, name))
            self.text += text

    def set(self, name: str | None, value: Any, meta: Any = None) -> None:
        """Sets a variable that is whole, unless it has no name."""
        if name is not None:
            self.variables[name] = Variable(value, meta, done=True)

    # ------------------------------------------------------------ forks

    def begin_children(self, expr: ForkPoint) -> None:
        """Gives the children all that is here. What is here goes on under a new id: the children's parent stays as it
        is now, for a backend that keeps it."""
        for child in expr.children:
            child._take_over(self)
        if expr.children and self.held:
            self.parent, self.id = self.id if self.parent is None else self.parent, self.run.new_id()

    def _take_over(self, parent: "Branch") -> None:
        self.text, self.segments = parent.text, list(parent.segments)
        self.messages = list(parent.messages)
        self._executor.take_over(parent._executor)
        self.variables = {name: value for name, value in parent.variables.items() if value.done} | self.variables
        self.fork_start = len(parent.text)
        self.held = parent.held
        if parent.held:
            self.parent = parent.id if parent.parent is None else parent.parent
        self.error = parent.error
        self._begun = True
        self._start()
        self.notify()


def _on_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
